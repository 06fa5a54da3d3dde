"""Time and error of the parts of compressing a decoder layer of llama2-7b on a GPU.

Usage: python benchmarks/compressing_parts.py OUT.csv

An error is the norm of the difference to float64 over the norm. `pruned` counts the weights whose mask differs from
that chosen column by column in torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.compress.prune import sparsegpt
from semisparse.compress.prune.factor import factorise
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.sweep_triton import prune_windows
from semisparse.compress.three_pass import ThreePassLinear, outer_sum
from semisparse.patterns import NM

TOKENS, HIDDEN, INNER, HEADS = 16384, 4096, 11008, 32
"""Tokens of a batch, and the sizes of llama2-7b."""


def milliseconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the mean time of a call, after one that is not timed."""
    work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / repeats


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error of the norm."""
    return float((found - exact).norm() / exact.norm())


@torch.no_grad()
def errors() -> list[dict[str, str]]:
    """Return the errors of what is not computed in float32, column by column."""
    x, weight = torch.randn(4096, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
    gram, product = x.double().T @ x.double(), x.double() @ weight.double().T
    with ThreePassLinear():
        y = F.linear(x, weight)
    rows = [
        {"part": "x.T @ x in three products", "error": f"{error(outer_sum(x, x), gram):.2g}"},
        {"part": "x.T @ x in float32", "error": f"{error(x.T @ x, gram):.2g}"},
        {"part": "x @ w.T in three products", "error": f"{error(y, product):.2g}"},
    ]
    factor = factorise((x.T @ x / len(x)).contiguous(), 0.01)
    assert factor
    found, mask = prune_windows(weight, factor.upper, 32, 64, 4, sparsegpt.UPDATE_COLUMNS)
    with patch.object(sparsegpt, "has_pruning_kernel", return_value=False):
        expected, kept = sparsegpt.prune_columns(weight, factor.upper, NM(32, 64))
    differing = str(int((mask != kept).sum()))
    sweep = {"part": "32:64 in Triton", "error": f"{error(found, expected):.2g}", "pruned": differing}
    return [*({"shape": "4096x1024"} | row for row in rows), {"shape": "512x1024"} | sweep]


@torch.no_grad()
def times() -> list[dict[str, str]]:
    """Return the rows of the largest linear layer, `down_proj`, and of a batch."""
    x, down = torch.randn(TOKENS, INNER, device="cuda"), torch.randn(HIDDEN, INNER, device="cuda")
    up, query = torch.randn(INNER, HIDDEN, device="cuda"), torch.randn(8, HEADS, 2048, 128, device="cuda")
    hessian = outer_sum(x, x) / TOKENS
    factor = factorise(hessian, 0.01)
    assert factor
    upper = factor.upper
    with ThreePassLinear():
        linear = milliseconds(lambda: F.linear(x[:, :HIDDEN], up))
    found = {
        f"x.T @ x in three products {TOKENS}x{INNER}": milliseconds(lambda: outer_sum(x, x)),
        f"x.T @ x in float32 {TOKENS}x{INNER}": milliseconds(lambda: x.T @ x),
        f"x @ w.T in three products {TOKENS}x{INNER}x{HIDDEN}": linear,
        f"attention in float32 {TOKENS}x{HIDDEN}": milliseconds(
            lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)
        ),
        f"inverse factor {INNER}": milliseconds(lambda: factorise(hessian, 0.01)),
        f"32:64 in Triton {HIDDEN}x{INNER}": milliseconds(lambda: prune_windows(down, upper, 32, 64, 4, 128)),
        f"conjugate gradients {HIDDEN}x{INNER}": milliseconds(
            lambda: conjugate_gradient(down, down > 0, hessian, down)
        ),
    }
    return [
        {"part": name.rpartition(" ")[0], "shape": name.rpartition(" ")[2], "ms": f"{ms:.1f}"}
        for name, ms in found.items()
    ]


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    torch.set_float32_matmul_precision("highest")
    write_rows(parser.parse_args().out, errors() + times(), ("part", "shape", "ms", "error", "pruned"))


if __name__ == "__main__":
    main()

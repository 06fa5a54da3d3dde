"""KL of models compressed with float32 matmuls, and with sums of three bfloat16 products.

Usage: python benchmarks/three_pass.py DATA OUT.csv [--seeds 0,1,2] [--models pycode-11m,babyllama-1m]
           [--patterns 32:64,2:4] [--matmuls "three products,float32"] [--set tune=bqpo] [--samples 32] [--chunks 64]
           [--device cpu]

`another order` is float32 with batches of half as many tokens: nothing but the order of the sums differs. On a CPU the
three products, which `compress` takes on GPUs only, are emulated: the operands are rounded, the sums are in float32.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from models import Subject, parser_of
from rows import read_rows, write_rows
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from semisparse.compress import calibration, propagate
from semisparse.compress.prune import RunningSums, layer, problem, refine, statistics
from semisparse.compress.three_pass import linear_with_gradients, outer_sum
from semisparse.nn import SparseLinear, weight_of

COLUMNS = ("model", "pattern", "samples", "seed", "device", "matmuls", "kl", "nll", "seconds")
PATTERNS = ("32:64", "2:4")


class EmulatedLinear(TorchFunctionMode):
    """While entered, ``F.linear`` of float32 tensors sums three products of rounded operands, as do its gradients."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        x, weight, bias = (*args, None)[:3] if func is F.linear else (None, None, None)
        if x is None or not x.dtype == weight.dtype == torch.float32:
            return func(*args, **kwargs or {})
        y = linear_with_gradients(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def accumulate(sums: RunningSums, key: str, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to a sum, as three products on any device."""
    sums._sums[key] = sums._sums.get(key, 0) + outer_sum(left, right)


@contextlib.contextmanager
def three_products(device: str) -> Iterator[None]:
    """Compress with three products, emulated on a CPU."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(EmulatedLinear())
            stack.enter_context(patch.object(RunningSums, "_accumulate", accumulate))
            for module in (layer, problem, refine, statistics):
                stack.enter_context(patch.object(module, "multiplier", lambda matrix: lambda x: outer_sum(x.T, matrix)))
        yield


@contextlib.contextmanager
def float32(device: str, batch_share: int = 1) -> Iterator[None]:
    """Compress with float32 matmuls, and with batches that are divided by ``batch_share``."""
    tokens = calibration.BATCH_TOKENS[device] // batch_share
    with (
        patch.object(propagate, "ThreePassLinear", contextlib.nullcontext),
        patch.object(statistics, "outer_sum", lambda left, right: left.T @ right),
        patch.dict(calibration.BATCH_TOKENS, {device: tokens}),
        contextlib.ExitStack() as stack,
    ):
        for module in (layer, problem, refine, statistics):
            stack.enter_context(patch.object(module, "multiplier", lambda matrix: lambda x: x @ matrix))
        yield


@torch.no_grad()
def unpacked(model: PreTrainedModel, subject: Subject) -> PreTrainedModel:
    """Return a dense model with a compressed model's weights: in float32 these have no fast kernel."""
    dense = copy.deepcopy(subject.dense)
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear):
            weight_of(dense.get_submodule(name)).copy_(module.weight)
    return dense


def main() -> None:
    """Append a row per model, pattern, seed and arithmetic to the CSV."""
    parser = parser_of(__doc__, None)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--models", default="babyllama-1m,pycode-11m")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--set", default="", help="a setting of the recipe, written after the pattern")
    parser.add_argument("--matmuls", default="three products,float32,another order")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    subjects = {name: Subject(name, options) for name in options.models.split(",")}
    for seed in options.seeds.split(","):
        for (name, subject), pattern in (
            (item, pattern) for item in subjects.items() for pattern in options.patterns.split(",")
        ):
            device = torch.device(subject.device).type
            ways = {
                "three products": three_products(device),
                "float32": float32(device),
                "another order": float32(device, 2),
            }
            for matmuls in options.matmuls.split(","):
                settings = ["search=none", f"pattern={pattern}", *filter(None, [options.set])]
                started = time.perf_counter()
                with ways[matmuls]:
                    model, _ = subject.compress("rheosparse", settings, int(seed))
                seconds, quality = time.perf_counter() - started, subject.measure(unpacked(model, subject))
                facts = torch.cuda.get_device_name() if device == "cuda" else "cpu"
                values = (
                    name,
                    f"{pattern} {options.set}".strip(),
                    options.samples or "",
                    seed,
                    facts,
                    matmuls,
                    f"{quality.kl:.5f}",
                    f"{quality.nll:.5f}",
                )
                rows.append(dict(zip(COLUMNS, (*values, f"{seconds:.1f}"), strict=True)))
                write_rows(options.csv, rows, COLUMNS)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()

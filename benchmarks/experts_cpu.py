"""One layer of packed experts on a CPU, beside transformers' dense experts: shapes of Qwen3-30B-A3B, 32 of 128 experts.

    OMP_NUM_THREADS=1 python benchmarks/experts_cpu.py results/cpu/experts.csv

Random weights: 32 experts, gate and up joined [1536, 2048], down [2048, 768], top 8 of uniformly drawn scores. Times
are CPU time of one thread, and the shortest of all rounds, so that other jobs disturb them less; dense and packed layers
take turns, and each call has other tokens. Dense is the faster of transformers' implementations `eager` and `grouped_mm`. Every output is compared
with the dense layer of the unpacked weights before it is timed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from semisparse.errors import KernelError
from semisparse.formats import get_format
from semisparse.nn import SparseExperts, SparseLinear
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

EXPERTS, TOP_K, HIDDEN, INNER = 32, 8, 2048, 768
TOKENS = (1, 8, 64, 512)
STEPS = 6
WAYS: Mapping[str, tuple[str, str, dict[str, str]]] = {
    "bitmask 32:64": ("bitmask", "32:64", {}),
    "bitmask 32:64 W8": ("bitmask", "32:64", {"kind": "w8"}),
    "bitmask 32:64 W4": ("bitmask", "32:64", {"kind": "w4"}),
    "gqs W4S50": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs W4 g128": ("gqs", "g128@0%", {"kind": "w4"}),
}
COLUMNS = ("dtype", "tokens", "way", "us", "dense_us", "speedup", "error", "rounds", "machine")

Operands = tuple[Tensor, Tensor, Tensor]
Layer = Callable[..., Tensor]


def dense_experts(dtype: torch.dtype) -> Any:
    """Return transformers' module with random weights."""
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN, moe_intermediate_size=INNER
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    for name, shape in (("gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, INNER))):
        weight = (torch.randn(shape) / shape[2] ** 0.5).to(dtype)
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))
    return experts


def packed_experts(dense: Any, way: str) -> tuple[SparseExperts, Any]:
    """Return the experts packed, and a dense module of the unpacked weights."""
    form, pattern, options = WAYS[way]
    experts, kept = SparseExperts(dense), parse_pattern(pattern)
    for name, layer in list(experts.named_modules()):
        if isinstance(layer, nn.Linear):
            weight = layer.weight * kept.mask(layer.weight.abs().float())
            experts.set_submodule(name, SparseLinear(get_format(form).pack(weight, kept, **options)))
    with torch.device("meta"):
        unpacked = copy.copy(dense)
        unpacked._parameters = dict(dense._parameters)
    return experts, experts.fuse_into(unpacked, dense.gate_up_proj.dtype)


def steps(tokens: int, dtype: torch.dtype) -> list[Operands]:
    """Draw the tokens of some steps, with the router's choice and its weights."""
    generator, drawn = torch.Generator().manual_seed(tokens), []
    for _ in range(STEPS):
        weights, chosen = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, dim=-1)
        x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
        drawn.append((x, chosen, (weights / weights.sum(-1, keepdim=True)).to(dtype)))
    return drawn


def implementation(dense: Any, name: str, *operands: Tensor) -> Tensor:
    """Compute the dense layer by one of transformers' implementations."""
    dense.config._experts_implementation = name
    return dense(*operands)


def seconds_in_turn(layers: Mapping[str, Layer], drawn: list[Operands], at_least: float) -> dict[str, list[float]]:
    """Return the CPU seconds of each layer's calls, taken in turn until each has taken ``at_least`` seconds."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    turn = 0
    while min(map(sum, times.values())) < at_least or turn < STEPS:
        for name, layer in layers.items():
            begin = time.process_time()
            layer(*drawn[turn % STEPS])
            times[name].append(time.process_time() - begin)
        turn += 1
    return times


@torch.no_grad()
def measure(dtype: torch.dtype, seconds: float) -> Iterator[dict[str, str]]:
    """Time every way at every number of tokens."""
    dense = dense_experts(dtype)
    for way in WAYS:
        experts, unpacked = packed_experts(dense, way)
        for tokens in TOKENS:
            drawn = steps(tokens, dtype)
            expected = implementation(unpacked, "eager", *drawn[0]).double()
            error = float((experts(*drawn[0]).double() - expected).norm() / expected.norm())
            if not error < (1e-4 if dtype == torch.float32 else 2e-2):
                raise KernelError(f"{way} is wrong at {tokens} tokens: relative error {error:.3g}; it was not timed")
            rivals = {name: partial(implementation, dense, name) for name in ("eager", "grouped_mm")}
            times = seconds_in_turn({**rivals, "packed": experts}, drawn, seconds)
            us = {name: 1e6 * min(found) for name, found in times.items()}
            best = min(us["eager"], us["grouped_mm"])
            values = (dtype, tokens, way, f"{us['packed']:.0f}", f"{best:.0f}", f"{best / us['packed']:.2f}",
                      f"{error:.1e}", len(times["packed"]), device_facts(torch.device("cpu")).name)  # fmt: skip
            yield dict(zip(COLUMNS, (str(value).removeprefix("torch.") for value in values), strict=True))


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU time of each layer at each number of tokens")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for measured in measure(dtype, options.seconds):
            rows.append(measured)
            write_rows(options.csv, rows, COLUMNS)
            print(*measured.values(), flush=True)


if __name__ == "__main__":
    main()

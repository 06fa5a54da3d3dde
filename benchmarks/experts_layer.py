"""What the benchmarks of a mixture's experts share: shapes of Qwen3-30B-A3B, steps of tokens, packed weights, rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.bench.timing import time_calls
from semisparse.formats import Packed, get_format
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
SHAPES = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
"""(N, K) of an expert's two layers: gate and up joined, and down."""

TOKENS = (1, 8, 64, 2048)
WAYS = {
    "bitmask 32:64": ("bitmask", "32:64", {}),
    "bitmask 32:64 W8": ("bitmask", "32:64", {"kind": "w8"}),
    "bitmask 32:64 W4": ("bitmask", "32:64", {"kind": "w4"}),
    "gqs W4S50": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs W4": ("gqs", "g16@0%", {"kind": "w4"}),
    "gqs W4 g128": ("gqs", "g128@0%", {"kind": "w4"}),
    "gqs W8 g128": ("gqs", "g128@0%", {"kind": "w8"}),
}
"""Format, pattern and options by name."""

COLUMNS = ("tokens", "routing", "way", "part", "us", "low_us", "high_us", "floor_us", "speedup", "error",
           "schedule", "machine")  # fmt: skip
BANDWIDTH, RATE = 4.28e12, 780e12
"""Measured on an H200: bytes and operations per second."""

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Step:
    """The tokens of a step, x [tokens, HIDDEN], and the router's choice."""

    x: Tensor
    chosen: Tensor
    weights: Tensor


def steps(tokens: int, routing: str = "uniform") -> list[Step]:
    """Draw as many steps as read a few gigabytes.

    Args:
        tokens: per step.
        routing: ``uniform``, where of one token each step has other experts than those before it; or ``zipf``, where
            the expert of rank r is drawn with a probability in proportion to 1 / r, without replacement.
    """
    generator = torch.Generator(GPU).manual_seed(tokens)
    drawn = []
    for number in range({1: 48, 8: 24, 64: 8}.get(tokens, 4)):
        scores = torch.rand(tokens, EXPERTS, generator=generator, device=GPU)
        weights = scores
        if routing == "zipf":
            ranks = torch.randperm(EXPERTS, generator=generator, device=GPU) + 1
            scores = -ranks.log() - (-scores.clamp(1e-9, 1 - 1e-7).log()).log()  # Gumbel noise: draws in proportion
        elif tokens == 1:
            scores[:, (torch.arange(TOP_K, device=GPU) + TOP_K * number) % EXPERTS] += 1
        chosen = scores.topk(TOP_K, dim=-1).indices
        weights = weights.gather(-1, chosen) + 0.1
        x = torch.randn(tokens, HIDDEN, generator=generator, device=GPU).to(DTYPE)
        drawn.append(Step(x, chosen, (weights / weights.sum(-1, keepdim=True)).to(DTYPE)))
    return drawn


def stacks(way: str) -> tuple[Packed, Packed]:
    """Draw and pack the weights of all experts: gate and up, and down."""
    form, pattern, options = WAYS[way]
    packed = []
    for n, k in SHAPES:
        weight = torch.randn(EXPERTS * n, k, generator=torch.Generator(GPU).manual_seed(n), device=GPU)
        weight = (weight * parse_pattern(pattern).mask(weight.abs()) / k**0.5).to(DTYPE)
        packed.append(get_format(form).pack(weight, pattern, **options).to(GPU))
    return packed[0], packed[1]


def floor_us(step: Step, bits: float) -> float:
    """Return the larger of the time of the chosen experts' bytes and that of the operations."""
    weights = 3 * INNER * HIDDEN
    read = step.chosen.unique().numel() * weights * bits / 8 / BANDWIDTH
    return 1e6 * max(read, 2 * step.chosen.numel() * weights / RATE)


def error_of(y: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def row(tokens: int, way: str, part: str, calls: Sequence[Call], **more: object) -> dict[str, str]:
    """Time calls, and return a row of the CSV."""
    for call in calls:
        call()
    timing = time_calls(calls, GPU)
    times = {"us": timing.us, "low_us": timing.low_us, "high_us": timing.high_us}
    shown = f"{more.get('routing', '')} {more.get('schedule', '')}"
    print(f"{tokens:5} {way:28} {part:10} {timing.us:9.2f}  {shown}", flush=True)
    values = {"tokens": tokens, "way": way, "part": part, **{k: f"{v:.2f}" for k, v in times.items()}, **more}
    return dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in values.items()} | {"machine": device_facts(GPU).name}

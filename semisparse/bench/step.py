"""What a decode step or a prompt takes beside the matmuls that a recipe compresses: attention, norms, SiLU, the head.

A matmul also takes another time in the engine than alone: fused kernels compute norms and SiLU, and with PDL a kernel
starts before its predecessor has ended. The ratio of the two times comes from measured steps of models whose linear
layers are all stored alike (steps.csv).
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch

from semisparse.bench.machines import Machine
from semisparse.bench.roofline import BASELINE, Candidate, estimate, estimate_matmul
from semisparse.bench.shapes import architecture, layer_shapes
from semisparse.formats import get_format
from semisparse.formats.kernel import MAX_FUSED_TOKENS, Pass
from semisparse.formats.tuned import variant_of
from semisparse.patterns import NO_ZEROS, parse_pattern

CONTEXT = 512
"""Tokens in the cache of each sequence of a decode step."""

ATTENTION_REACHED = 0.5
"""Fraction of the tensor cores' peak that attention over a prompt reaches."""

ALIKE_TOKENS = 4
"""Maximum factor between the tokens of a measured step and those of a matmul whose time it corrects. A step of few
tokens is fused and bound by memory, a long prompt neither."""

STEPS = Path(__file__).parent / "steps.csv"


@dataclass(frozen=True)
class MeasuredStep:
    """A line of steps.csv: a step of the engine, of a model whose linear layers are all stored alike.

    Args:
        gpu: the GPU's name, as the driver reports it.
        arch: the architecture, a name in `ARCHITECTURES`.
        layers: number of decoder layers.
        format: how the linear layers are stored; likewise pattern, and variant (as in `TunedRow`; may be empty).
        m: tokens: 1 for a decode step, more for a prompt.
        us: microseconds.
    """

    gpu: str
    arch: str
    layers: int
    format: str
    pattern: str
    variant: str
    m: int
    us: float

    @property
    def candidate(self) -> Candidate:
        """How the linear layers are stored."""
        values = zip(get_format(self.format).tuned_by, self.variant.split(" "), strict=False)
        return Candidate(self.format, self.pattern, {name: value for name, value in values if value})


def beside_seconds(config: Any, m: int, is_prompt: bool, dtype: torch.dtype, machine: Machine) -> float:
    """Predict the time of a decode step or a prompt without the linear layers of the decoder layers.

    Attention, the norms, SiLU and what rotates and caches keys are counted once per decoder layer; the head once.
    Kernels that are fused with matmuls are not counted: `in_engine` has their time.

    Args:
        config: a transformers configuration.
        m: tokens of the step or of the prompt.
        is_prompt: whether they are one prompt, not a decode step of as many sequences.
        dtype: dtype of weights and activations.
        machine: the machine that is predicted for.
    """
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    cached = 2 * (getattr(config, "num_key_value_heads", None) or heads) * dim * dtype.itemsize
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if is_prompt:
        attention = Pass(m * cached, 2.0 * m * m * heads * dim, _unit(dtype), reached=ATTENTION_REACHED)
    else:
        attention = Pass(m * CONTEXT * cached, 4.0 * m * CONTEXT * heads * dim, "fp32")
    passes = [attention]
    if machine.device != "cuda" or m > MAX_FUSED_TOKENS:
        moved = m * hidden * dtype.itemsize  # bytes of the hidden states
        passes += [Pass(4 * moved, 0, "fp32"), Pass(4 * moved, 0, "fp32")]  # a norm: reads x and the sum, writes both
        passes += [
            Pass(4 * moved, 0, "fp32"),
            Pass(3 * m * inner * dtype.itemsize, 0, "fp32"),
        ]  # rotate and cache; SiLU
    rows = 1 if is_prompt else m
    head, _ = estimate_matmul(Candidate(BASELINE, NO_ZEROS), rows, config.vocab_size, hidden, dtype, machine)
    ends = 2 * machine.kernel_seconds  # the embedding, and the choice of a token
    return int(config.num_hidden_layers) * estimate(passes, machine).seconds + head.seconds + ends


def _unit(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "tensor fp16"


def in_engine(candidate: Candidate, seconds: float, m: int, dtype: torch.dtype, machine: Machine) -> float:
    """Convert the time of a matmul alone to the time that it adds to a step of the engine.

    Args:
        candidate: how the weight is stored.
        seconds: the time of the matmul alone, measured or predicted.
        m: tokens.
        dtype: dtype of weights and activations.
        machine: where. Without a measured step of the format with such tokens, the time is returned as it is.
    """
    pattern = parse_pattern(candidate.pattern)
    variant = variant_of(candidate.options, get_format(candidate.format).tuned_by)
    near = [
        step
        for step in _steps(machine.name)
        if (step.format, step.variant) == (candidate.format, variant)
        and type(parse_pattern(step.pattern)) is type(pattern)
        and (parse_pattern(step.pattern).density == 1) == (pattern.density == 1)
        and max(step.m, m) <= ALIKE_TOKENS * min(step.m, m)
    ]
    if not near:
        return seconds
    return seconds * _ratio(min(near, key=lambda step: _distance(step.pattern, candidate.pattern)), dtype, machine)


def _distance(written: str, other: str) -> tuple[float, float, str]:
    """Return how far two patterns of one type are apart: in density, then in the columns of their groups."""
    first, second = parse_pattern(written), parse_pattern(other)
    apart = abs(math.log(max(first.density, 1e-9) / max(second.density, 1e-9)))
    return apart, abs(math.log(getattr(first, "size", 1) / getattr(second, "size", 1))), written


def _ratio(step: MeasuredStep, dtype: torch.dtype, machine: Machine) -> float:
    """Return the ratio by which the times of its matmuls alone are multiplied, so that they add up to a step."""
    config = architecture(step.arch)
    of_all, config.num_hidden_layers = config.num_hidden_layers, step.layers
    beside = beside_seconds(config, step.m, step.m > 1, dtype, machine)
    alone = sum(
        layer.count * estimate_matmul(step.candidate, step.m, layer.n, layer.k, dtype, machine)[0].seconds
        for layer in layer_shapes(f"{step.arch}:fused")
    )
    return (step.us * 1e-6 - beside) / (alone * step.layers / of_all)


@cache
def _steps(gpu: str) -> tuple[MeasuredStep, ...]:
    """Return a GPU's measured steps."""
    types = get_type_hints(MeasuredStep)
    with STEPS.open(newline="", encoding="utf-8") as file:
        rows = [MeasuredStep(**{name: types[name](row[name]) for name in types}) for row in csv.DictReader(file)]
    return tuple(row for row in rows if row.gpu == gpu)

"""What a decode step or a prompt takes beside the matmuls that a recipe compresses: attention, norms, SiLU, the head.

A matmul also takes another time in the engine than alone: fused kernels compute norms and SiLU, and with PDL a kernel
starts before its predecessor has ended. Measured ratios of the two times are in steps.csv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from semisparse.bench.machines import Machine
from semisparse.bench.roofline import BASELINE, Candidate, estimate, estimate_matmul
from semisparse.formats.kernel import MAX_FUSED_TOKENS, Pass
from semisparse.patterns import NO_ZEROS, parse_pattern

CONTEXT = 512
"""Tokens in the cache of each sequence of a decode step."""

ATTENTION_REACHED = 0.5
"""Fraction of the tensor cores' peak that attention over a prompt reaches."""

RATIOS = Path(__file__).parent / "steps.csv"


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


def in_engine(candidate: Candidate, seconds: float, m: int, machine: Machine) -> float:
    """Convert the time of a matmul alone to the time that it adds to a step of the engine.

    Args:
        candidate: how the weight is stored.
        seconds: the time of the matmul alone, measured or predicted.
        m: tokens.
        machine: where. A machine without measured ratios keeps the time.
    """
    found = _ratios(machine.name).get((candidate.format, _variant(candidate)), {})
    pattern = parse_pattern(candidate.pattern)
    near = {
        written: by_tokens
        for written, by_tokens in found.items()
        if type(parse_pattern(written)) is type(pattern)
        and (parse_pattern(written).density == 1) == (pattern.density == 1)
    }
    if not near:
        return seconds
    by_tokens = near[min(near, key=lambda written: _distance(written, candidate.pattern))]
    # A step of few tokens is fused and bound by memory, a prompt neither: there is no ratio between the two.
    alike = {
        tokens: ratio for tokens, ratio in by_tokens.items() if (tokens <= MAX_FUSED_TOKENS) == (m <= MAX_FUSED_TOKENS)
    }
    if not alike:
        return seconds
    return seconds * alike[min(alike, key=lambda tokens: abs(math.log(tokens / m)))]


def _distance(written: str, other: str) -> tuple[float, str]:
    """Return how far two patterns of one type are apart: in density, then in the size of their groups."""
    first, second = parse_pattern(written), parse_pattern(other)
    sizes = [getattr(pattern, "size", 1) for pattern in (first, second)]
    apart = abs(math.log(max(first.density, 1e-9) / max(second.density, 1e-9))) + abs(math.log(sizes[0] / sizes[1])) / 9
    return apart, written


def _variant(candidate: Candidate) -> str:
    return " ".join(str(value) for value in candidate.options.values())


@cache
def _ratios(gpu: str) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Return a GPU's ratios by (format, variant), pattern and tokens."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    with RATIOS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["gpu"] == gpu:
                by_pattern = found.setdefault((row["format"], row["variant"]), {})
                by_pattern.setdefault(row["pattern"], {})[int(row["m"])] = float(row["ratio"])
    return found


def ratio_of(step: float, beside: float, alone: Sequence[float]) -> float:
    """Return the ratio that `in_engine` multiplies by, from a model whose linear layers are all stored alike.

    Args:
        step: the measured seconds of its step or prompt.
        beside: what `beside_seconds` predicts.
        alone: the seconds of each of its matmuls alone.
    """
    return (step - beside) / sum(alone)

"""The frontier: what KL divergence the best choice of patterns, bits and formats gives at each size and speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from semisparse import checkpoint
from semisparse.api.loading import load_uncompressed
from semisparse.api.sequences import Text, sequence_length
from semisparse.api.targets import options_for, written
from semisparse.bench.machines import find_machine
from semisparse.compress import Progress, Recipe, calibration_batches, split_decoder_experts, warn_if_fewer
from semisparse.compress.search.allocate import Unreachable
from semisparse.compress.search.costs import Assignment
from semisparse.compress.search.losses import ChoiceLosses
from semisparse.patterns import NO_ZEROS
from semisparse.runtime.modes import torch_defaults

TOKENS = 32 * 1024
"""Calibration tokens by default: enough for choosing a target; `compress` then measures on more."""

STEPS = 10
"""Steps per cost from its least possible budget to that of dense; there is one more budget than steps."""

WORKLOADS = ("decode", "prompt")


@dataclass(frozen=True)
class Point:
    """A model on the front, or one with a single choice for all layers.

    Args:
        recipe: what `compress` takes: a target such as ``bits=3``, or a choice such as ``gqs w4 g128@0%``.
        bits: stored bits per weight of the linear layers.
        kl: KL(dense || model) on calibration tokens, without tuning, in nats per token.
        decode_ms: predicted time of a decode step of one token, in milliseconds.
        prompt_ms: the same for a prompt of 2,048 tokens.
    """

    recipe: str
    bits: float
    kl: float
    decode_ms: float
    prompt_ms: float

    @property
    def _costs(self) -> tuple[float, ...]:
        return self.bits, self.kl, self.decode_ms, self.prompt_ms

    def dominates(self, other: Point) -> bool:
        """Return whether the point is nowhere worse than another, and somewhere better."""
        pairs = list(zip(self._costs, other._costs, strict=True))
        return all(mine <= its for mine, its in pairs) and any(mine < its for mine, its in pairs)


@dataclass(frozen=True)
class Frontier:
    """The Pareto front of KL divergence against bits, decode time and prompt time.

    Args:
        gpu: the machine that times are predicted for.
        points: the front, by bits; no point is better than another in every respect.
        uniform: every single choice for all layers.
        seconds: wall time.
    """

    gpu: str
    points: list[Point]
    uniform: list[Point]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@torch_defaults()
def frontier(
    model: str | Path,
    calibration: Text,
    *,
    gpu: str = "auto",
    samples: int | None = None,
    seqlen: int | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> Frontier:
    """Measure what each choice for each layer loses, and combine the choices; nothing is packed or written.

    Args:
        model: a dense model directory.
        calibration: a text file or documents.
        gpu: the machine that times are predicted for, as in `plan`.
        samples: calibration sequences; by default as many as hold `TOKENS` tokens.
        seqlen: tokens per sequence; by default the model's context, 2048 at most.
        device: where to compute: ``auto``, ``cpu`` or ``cuda``.
        seed: the random seed.
        progress: called with (stage, steps done, all steps).
    Raises:
        InputError: the model, the text or the machine cannot be used.
    """
    start = time.perf_counter()
    machine, where = find_machine(gpu), checkpoint.pick_device(device)
    source = Path(model)
    (dense, _), tokenizer = load_uncompressed(source), checkpoint.load_tokenizer(source)
    length = sequence_length(dense, seqlen)
    wanted = samples or max(2, -(-TOKENS // length))
    batches = calibration_batches(tokenizer, calibration, samples=wanted, seqlen=length, seed=seed)
    warn_if_fewer(batches, samples)
    recipe = Recipe(pattern=NO_ZEROS)
    split_decoder_experts(dense, recipe)
    options = options_for(dense, recipe, WORKLOADS, machine, rounds=machine.device == "cuda")
    search = ChoiceLosses(dense, batches, recipe, options, seed=seed, device=where, progress=progress, journal=None)
    search.measure(search.costs.dense)
    points = []
    budgets = _budgets(search)
    for done, limits in enumerate(budgets):
        progress("measuring the front", done, len(budgets))
        try:
            points.append(_point(search, _target(limits, dense.dtype.itemsize), search.best(limits)))
        except Unreachable:  # by rounding errors: the least budget is just the sum of the least costs
            continue
    uniform = [
        _point(search, choice.label, picks, search.uniform_kl[choice])
        for choice, picks in search.costs.uniforms().items()
        if not choice.is_dense
    ]
    front = [point for point in points if not any(other.dominates(point) for other in [*points, *uniform])]
    unique = {(point.bits, point.kl, point.decode_ms, point.prompt_ms): point for point in front}
    ordered = sorted(unique.values(), key=lambda point: (point.bits, point.kl))
    return Frontier(machine.name, ordered, uniform, time.perf_counter() - start)


def _budgets(search: ChoiceLosses) -> list[dict[str, float]]:
    """Return limits relative to dense, on one cost each: geometric steps from the least possible total to dense."""
    budgets = []
    for name in ("bits", *WORKLOADS):
        least = sum(min(option.costs[name] for option in unit.options) for unit in search.units)
        least = min(1.0, least / search.costs.of_dense[name]) * (1 + 1e-6)
        budgets += [{name: least ** (1 - step / STEPS)} for step in range(STEPS + 1)]
    return budgets


def _target(limits: Mapping[str, float], itemsize: int) -> str:
    """Write a limit as the target that gives it."""
    ((name, share),) = limits.items()
    return written({"bits": share * 8 * itemsize} if name == "bits" else {name: 1 / share})


def _point(search: ChoiceLosses, recipe: str, picks: Assignment, kl: float | None = None) -> Point:
    totals = search.costs.totals(picks)
    weights = sum(unit.weights for unit in search.units)
    loss = search.kl(picks) if kl is None else kl
    # Where nothing is lost, rounding errors of the sums can make the KL divergence negative.
    return Point(recipe, totals["bits"] / weights, max(loss, 0.0), 1e3 * totals["decode"], 1e3 * totals["prompt"])

"""The time that a matmul's kernels take on a machine: by the roofline model, or by a measured table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from semisparse.bench.machines import Machine
from semisparse.errors import InputError
from semisparse.formats.base import Format, Packed, get_format, registry
from semisparse.formats.kernel import Pass, Problem
from semisparse.formats.tuned import measured_times
from semisparse.patterns import NO_ZEROS, Pattern, parse_pattern

BASELINE = "dense"
"""The format of the dense matmul that speed-ups are relative to."""

SAMPLE_ROWS = 128
"""Rows of a random weight that are packed to predict the bytes of a whole weight, padding and metadata included. More
rows take more time, and change only what is predicted for masks that differ by row, such as those of `ec_csr`."""

SMALL = (64, 256)
"""N and K of the weight that is packed to check pack options. Every format can store this shape."""


@dataclass(frozen=True)
class Candidate:
    """A format, a pattern that it can store, and its pack options."""

    format: str
    pattern: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """The name in tables, such as ``bitmask 32:64``."""
        words = [self.format, *(str(value) for value in self.options.values())]
        return " ".join(words if self.pattern == NO_ZEROS else [*words, self.pattern])

    @property
    def is_baseline(self) -> bool:
        """Whether this is the dense, unquantised weight."""
        return self.format == BASELINE and not self.options and self.pattern == NO_ZEROS


@dataclass(frozen=True)
class Estimate:
    """The predicted time of a matmul on a machine. A matmul consists of one or several passes (kernel launches).

    Args:
        bytes: bytes read and written by all passes.
        operations: operations of all passes.
        floor_seconds: the sum over the passes of the larger of memory time and arithmetic time.
        seconds: the predicted time, a sum over the passes. A pass takes a fixed time, and the largest of memory time,
            unpacking time, and arithmetic time at the fraction of the peak that the kernel reaches.
        bound: ``memory``, ``arithmetic``, ``unpacking`` or ``fixed time``, whichever takes most of the time.
        strategy: the passes' strategies (`Pass.strategy`).
        measured: whether ``seconds`` is dense's time over a speed-up that was measured on such a machine.
    """

    bytes: float
    operations: float
    floor_seconds: float
    seconds: float
    bound: str
    strategy: str = ""
    measured: bool = False


def candidates(formats: Iterable[str] | None = None, patterns: Iterable[str] | None = None) -> list[Candidate]:
    """Return the candidates for a comparison: the dense baseline, then each format with all its variants.

    Args:
        formats: names; None for all.
        patterns: written patterns, such as ``6:8``; None for those of each format's recipes. Each format is combined
            with those that it can store.
    Raises:
        InputError: a format is unknown.
        PatternError: a pattern cannot be parsed.
    """
    requested = None if patterns is None else [str(parse_pattern(p)) for p in patterns]
    listed = [Candidate(BASELINE, NO_ZEROS)]
    for form in registry().values() if formats is None else [get_format(name) for name in formats]:
        wanted = [NO_ZEROS] if form.name == BASELINE else requested or _recipe_patterns(form)
        usable = [p for p in wanted if form.accepts(parse_pattern(p)) is None]
        listed += [Candidate(form.name, p, options) for p in usable for options in form.variants]
    return list({candidate.label: candidate for candidate in listed}.values())


def candidate_named(form: str, pattern: str | None = None, options: Mapping[str, Any] | None = None) -> Candidate:
    """Return the first candidate of a format.

    Args:
        form: the format's name.
        pattern: a written pattern; None for that of the format's first recipe.
        options: pack options that replace the candidate's own.
    Raises:
        InputError: the format is unknown, has no recipe with a pattern, or cannot store the pattern.
        FormatError: the format has no such option, or the option has no such value.
    """
    matching = [c for c in candidates([form], None if pattern is None else [pattern]) if c.format == form]
    if not matching:
        reason = "has no recipe with a pattern: give --pattern" if pattern is None else f"cannot store {pattern}"
        raise InputError(f"format {form} {reason}")
    if not options:
        return matching[0]
    candidate = replace(matching[0], options={**matching[0].options, **options})
    small = random_weight(parse_pattern(candidate.pattern), *SMALL, torch.bfloat16, "cpu")
    get_format(form).pack(small, candidate.pattern, **candidate.options)  # refuses an unknown option before any timing
    return candidate


def _recipe_patterns(form: Format) -> list[str]:
    return list(dict.fromkeys(str(recipe["pattern"]) for recipe in form.recipes.values() if "pattern" in recipe))


def problem_for(candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Problem, float]:
    """Return the problem of a matmul whose weight is not packed, and the bytes that it would take on disk.

    Args:
        candidate: how the weight is stored.
        m: tokens.
        n: output features.
        k: input features.
        dtype: dtype of weight and activations.
        device: ``cuda`` or ``cpu``.
    Raises:
        FormatError: the format cannot store a weight of this shape.
    """
    sample = packed_sample(candidate, n, k, dtype)
    spec = replace(get_format(candidate.format).structure(sample.spec), shape=(n, k))
    # The last rows are sampled apart: formats pad them to whole tiles of rows.
    samples, rest = divmod(n, SAMPLE_ROWS)
    stored = samples * sample.nbytes + (packed_sample(candidate, rest, k, dtype).nbytes if rest else 0)
    return Problem(m, spec, dtype, torch.device(device)), stored


def packed_sample(candidate: Candidate, n: int, k: int, dtype: torch.dtype) -> Packed:
    """Return a random weight of K columns, and of N rows or `SAMPLE_ROWS` if that is less, as the format stores it.

    Raises:
        FormatError: the format cannot store a weight of this shape.
    """
    return _packed_sample(
        candidate.format, candidate.pattern, tuple(candidate.options.items()), min(n, SAMPLE_ROWS), k, dtype
    )


def problem_on(
    candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, machine: Machine
) -> tuple[Problem, float, float]:
    """Return the problem of a matmul on a machine, in the layout of its weights there.

    Returns:
        The problem; the bytes of the weight in that layout, about; its bytes on disk.
    Raises:
        FormatError: the format cannot store a weight of this shape.
    """
    problem, stored = problem_for(candidate, m, n, k, dtype, machine.device)
    if machine.device != "cuda":
        return problem, stored, stored
    form = get_format(candidate.format)
    spec = form.spec_on_gpu(problem.spec, machine.capability)
    return replace(problem, spec=spec), form.gpu_bytes(spec, stored), stored


def modelled(candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, machine: Machine) -> Estimate:
    """Return what the roofline model alone predicts for a matmul on a machine; raises as `estimate_matmul` does."""
    problem, weight_bytes, _ = problem_on(candidate, m, n, k, dtype, machine)
    return estimate(get_format(candidate.format).cost(problem, weight_bytes), machine)


@lru_cache(maxsize=256)
def _packed_sample(
    form: str, pattern: str, options: tuple[tuple[str, Any], ...], n: int, k: int, dtype: torch.dtype
) -> Packed:
    return get_format(form).pack(_sample(pattern, n, k, dtype), pattern, **dict(options))


@lru_cache(maxsize=16)
def _sample(pattern: str, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the random weight that all options of the formats of a pattern are packed from."""
    return random_weight(parse_pattern(pattern), n, k, dtype, "cpu")


def random_weight(pattern: Pattern, n: int, k: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a random weight [N, K] that obeys a pattern. The same arguments give the same weight."""
    generator = torch.Generator(device).manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator, device=device)
    weight *= pattern.mask(weight.abs())
    return (weight / k**0.5).to(dtype)


def estimate(passes: Iterable[Pass], machine: Machine) -> Estimate:
    """Apply the roofline model to each pass of a matmul, and add up.

    Raises:
        InputError: the machine has no rate for a unit that a pass uses.
    """
    total_bytes = operations = floor = busy = 0.0
    seconds = {"memory": 0.0, "arithmetic": 0.0, "unpacking": 0.0, "fixed time": 0.0}
    strategies = []
    for step in passes:
        for unit, count in ((step.unit, step.operations), ("fp32", step.unpacking)):
            if count and unit not in machine.peaks:
                raise InputError(f"{machine.name} has no known rate for {unit}")
        memory = step.bytes / machine.bandwidth
        arithmetic = step.operations / machine.peaks[step.unit] if step.operations else 0.0
        unpacking = step.unpacking / machine.peaks["fp32"] if step.unpacking else 0.0
        total_bytes += step.bytes
        operations += step.operations
        floor += max(memory, arithmetic)
        times = {"memory": memory, "arithmetic": arithmetic / step.reached, "unpacking": unpacking}
        bound = max(times, key=lambda name: times[name])
        busy += times[bound]
        seconds[bound] += times[bound]
        seconds["fixed time"] += machine.kernel_seconds
        if step.strategy:
            strategies.append(step.strategy)
    bound = max(seconds, key=lambda name: seconds[name])
    return Estimate(total_bytes, operations, floor, busy + seconds["fixed time"], bound, "; ".join(strategies))


def estimate_matmul(
    candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, machine: Machine
) -> tuple[Estimate, float]:
    """Return the estimate of a matmul on a machine, and the bits per weight on disk.

    Where the machine's tables (`bench tune`) have a matmul like this one, its measured speed-up over dense replaces the
    predicted one.

    Raises:
        FormatError: the format cannot store a weight of this shape.
        InputError: the machine has no rate for a unit that a pass uses.
    """
    problem, weight_bytes, stored = problem_on(candidate, m, n, k, dtype, machine)
    form = get_format(candidate.format)
    predicted = estimate(form.cost(problem, weight_bytes), machine)
    if not candidate.is_baseline:
        times = measured_times(problem, form.tuned_by, machine.name).values()
        if times:
            dense, _ = estimate_matmul(Candidate(BASELINE, NO_ZEROS), m, n, k, dtype, machine)
            share = min(measured.us / measured.dense_us for measured in times)
            predicted = replace(predicted, seconds=dense.seconds * share, measured=True)
    return predicted, 8 * stored / (n * k)

"""The roofline model: what a product's passes take at the least on a machine, and what bounds them."""

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
from semisparse.patterns import Pattern, parse_pattern

BASELINE = "dense"
"""The format of the dense product that every speed-up is over."""

NO_ZEROS = "0%"

SAMPLE_ROWS = 256
"""Rows that are packed to learn how many bits a weight takes, padding and metadata included."""


@dataclass(frozen=True)
class Candidate:
    """A format, a pattern that it can store, and its pack options."""

    format: str
    pattern: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        """Such as ``bitmask 32:64``."""
        words = [self.format, *(str(value) for value in self.options.values())]
        return " ".join(words if self.pattern == NO_ZEROS else [*words, self.pattern])

    @property
    def is_baseline(self) -> bool:
        """Whether this is the weight as it is."""
        return self.format == BASELINE and not self.options and self.pattern == NO_ZEROS


@dataclass(frozen=True)
class Estimate:
    """What a product takes on a machine.

    Args:
        bytes: read and written in all passes.
        operations: of all passes.
        floor_seconds: the sum over the passes of the larger of their memory and arithmetic times.
        seconds: the same with what the kernels reach and what unpacking takes, and each kernel's fixed time.
        bound: ``memory``, ``arithmetic``, ``unpacking`` or ``fixed time``, whichever is most of it.
        strategy: how the kernels go about it, where the format says so.
    """

    bytes: float
    operations: float
    floor_seconds: float
    seconds: float
    bound: str
    strategy: str = ""


def candidates(formats: Iterable[str] | None = None, patterns: Iterable[str] | None = None) -> list[Candidate]:
    """List what may be compared: the dense baseline first, then each format in the variants it declares.

    Args:
        formats: names, or None for all.
        patterns: written forms; None for those of each format's own recipes. A format gets those it can store.
    Raises:
        InputError: a name is unknown.
        PatternError: a pattern cannot be parsed.
    """
    asked = None if patterns is None else [str(parse_pattern(p)) for p in patterns]
    found = [Candidate(BASELINE, NO_ZEROS)]
    for form in registry().values() if formats is None else [get_format(name) for name in formats]:
        own = [NO_ZEROS] if form.name == BASELINE else asked or _recipe_patterns(form)
        usable = [p for p in own if form.accepts(parse_pattern(p)) is None]
        found += [Candidate(form.name, p, options) for p in usable for options in form.variants]
    return list({candidate.label: candidate for candidate in found}.values())


def _recipe_patterns(form: Format) -> list[str]:
    return list(dict.fromkeys(str(recipe["pattern"]) for recipe in form.recipes.values() if "pattern" in recipe))


def problem_for(candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Problem, float]:
    """Describe a product that nobody has packed yet, with the bytes that its weight would take.

    Raises:
        FormatError: the format cannot store a weight of this shape.
    """
    sample = _sample(
        candidate.format, candidate.pattern, tuple(candidate.options.items()), min(n, SAMPLE_ROWS), k, dtype
    )
    spec = replace(get_format(candidate.format).structure(sample.spec), shape=(n, k))
    return Problem(m, spec, dtype, torch.device(device)), sample.nbytes * n / sample.shape[0]


@lru_cache(maxsize=256)
def _sample(
    form: str, pattern: str, options: tuple[tuple[str, Any], ...], n: int, k: int, dtype: torch.dtype
) -> Packed:
    weight = random_weight(parse_pattern(pattern), n, k, dtype, "cpu")
    return get_format(form).pack(weight, pattern, **dict(options))


def random_weight(pattern: Pattern, n: int, k: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Draw a weight [N, K] that obeys a pattern, the same at each call on a device."""
    generator = torch.Generator(device).manual_seed(n * k)
    weight = torch.randn(n, k, generator=generator, device=device)
    weight *= pattern.mask(weight.abs())
    return (weight / k**0.5).to(dtype)


def estimate(passes: Iterable[Pass], machine: Machine) -> Estimate:
    """Apply the roofline to each pass.

    Raises:
        InputError: the machine lacks a unit that a pass computes on.
    """
    moved = computed = floor = seconds = memory = arithmetic = unpacking = fixed = 0.0
    strategies = []
    for step in passes:
        strategies += [step.strategy] if step.strategy else []
        for unit, operations in ((step.unit, step.operations), ("fp32", step.unpacking)):
            if operations and unit not in machine.peaks:
                raise InputError(f"{machine.name} has no known rate for {unit}")
        moved += step.bytes
        computed += step.operations
        reading = step.bytes / machine.bandwidth
        computing = step.operations / machine.peaks[step.unit] if step.operations else 0.0
        floor += max(reading, computing)
        computing /= step.reached
        finding = step.unpacking / machine.peaks["fp32"] if step.unpacking else 0.0
        longest = max(reading, computing, finding)
        seconds += longest
        memory += reading if reading == longest else 0.0
        arithmetic += computing if computing == longest > reading else 0.0
        unpacking += finding if finding == longest > max(reading, computing) else 0.0
        fixed += machine.kernel_seconds
    shares = {"memory": memory, "arithmetic": arithmetic, "unpacking": unpacking, "fixed time": fixed}
    bound = max(shares, key=lambda name: shares[name])
    return Estimate(moved, computed, floor, seconds + fixed, bound, "; ".join(strategies))


def estimate_product(
    candidate: Candidate, m: int, n: int, k: int, dtype: torch.dtype, machine: Machine
) -> tuple[Estimate, float]:
    """Estimate one product; gives the bits a weight too.

    Raises:
        FormatError: the format cannot store a weight of this shape.
        InputError: the machine lacks a unit.
    """
    problem, weight_bytes = problem_for(candidate, m, n, k, dtype, machine.device)
    passes = get_format(candidate.format).cost(problem, weight_bytes)
    return estimate(passes, machine), 8 * weight_bytes / (n * k)

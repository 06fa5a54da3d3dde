"""Allocate density by what each linear layer loses or gains alone: a search's effects nearly add up.

The sum of the single effects predicts the KL of a candidate that changes several layers with a correlation of 0.97
(docs/experiments/search.md), and an exact allocation by sums needs no luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from semisparse.compress.search.space import Candidate, LinearSpace

MAX_TABLE = 1 << 25
"""Entries of the table of `allocate_exactly` at most. Sizes without a common divisor would need more."""


def levels_to_measure(linear: LinearSpace, centre: int, stride: int) -> list[int]:
    """Return the levels of one linear layer whose effect is measured: the nearest and the furthest to each side.

    Args:
        linear: its levels, at whole strides from ``centre``.
        centre: its level in the parent.
        stride: of the stage.
    """
    near = {centre - stride, centre + stride} & linear.kept.keys()
    return sorted((near | {min(linear.kept), max(linear.kept)}) - {centre})


def interpolated(levels: Sequence[int], measured: Mapping[int, float]) -> dict[int, float]:
    """Return the effect at every level, piecewise linear between those measured, which include the outermost."""
    known = sorted(measured)
    effects = {}
    for level in levels:
        above = next(each for each in known if each >= level)
        below = max(each for each in known if each <= level)
        share = (level - below) / (above - below) if above > below else 0.0
        effects[level] = measured[below] + share * (measured[above] - measured[below])
    return effects


def allocate_exactly(
    space: Sequence[LinearSpace], effects: Sequence[Mapping[int, float]], start: Candidate
) -> Candidate | None:
    """Return the candidate whose effects have the least sum, of those that keep as many weights as ``start``.

    Args:
        space: all linear layers.
        effects: of each, by the levels it may take; that of ``start`` is one of them.
        start: a candidate.
    Returns:
        The candidate; None if the sizes of the layers have so small a divisor that the table would be too large.
    """
    changes = [
        {level: linear.kept[level] - linear.kept[before] for level in sorted(of_layer)}
        for linear, before, of_layer in zip(space, start, effects, strict=True)
    ]
    unit = math.gcd(*(change for of_layer in changes for change in of_layer.values())) or 1
    low, high = (sum(bound(of_layer.values()) for of_layer in changes) // unit for bound in (min, max))
    width = high - low + 1
    if width * len(space) > MAX_TABLE:
        return None
    # best[t] is the least sum of effects of the layers so far that change the number of weights by (low + t) units.
    best = torch.full((width,), math.inf, dtype=torch.float64)
    best[-low] = 0.0
    chosen = torch.zeros(len(space), width, dtype=torch.int16)
    for index, (of_layer, effect) in enumerate(zip(changes, effects, strict=True)):
        options = [_shifted(best, change // unit) + effect[level] for level, change in of_layer.items()]
        best, picks = torch.stack(options).min(0)
        chosen[index] = picks
    at, candidate = -low, []
    for index in reversed(range(len(space))):
        level, change = list(changes[index].items())[int(chosen[index, at])]
        candidate.append(level)
        at -= change // unit
    return tuple(reversed(candidate))


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Move every value ``by`` places up; places without one are infinite."""
    result = torch.full_like(values, math.inf)
    if by >= 0:
        result[by:] = values[: len(values) - by]
    else:
        result[:by] = values[-by:]
    return result

"""``search=profile``: density as a function of a linear layer's role and depth, by pruning the whole model anew.

A candidate is a few numbers, one per `Factor`: how much denser the linear layers of each role are, and how density
changes with depth. Few numbers need few candidates, so each candidate can be a whole pruned model, and the model that
is scored is the one that is kept. The searches over a bank score a layer with weights that were pruned for other
inputs; with ``target=residual`` such weights hide what a higher density gains (docs/experiments/search.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from semisparse.compress.search.space import STAGE_STRIDES, Candidate, LinearSpace, kept_weights

STEP = 6
"""Change of density, in 64ths, by which each factor's effect is measured."""

MAX_STEPS = 4
"""Maximum length of the final step, in units of `STEP` for the factor that changes most."""

LEAST_STEPS = 2
"""Lengths of the final step that are scored at least: the second one can be worse than the first."""

REACH = 5
"""How far a linear layer may move from the uniform pattern, as in `search_space`: 35 of 64 levels."""

DEPTH = "depth"

Factor = str
"""`DEPTH`, or a role: the name of a linear layer in its decoder layer, without numbers of experts."""

Shifts = Mapping[Factor, float]
"""Change of density by factor, in 64ths. A role's applies to its linear layers. That of `DEPTH` applies to the last
decoder layer, its negative to the first, and the layers between are interpolated linearly."""


def factors_of(space: Sequence[LinearSpace]) -> dict[Factor, float]:
    """Return the factors, each with the share of the weights that it changes.

    The role with the most weights is not a factor: the total is fixed, so its density follows from that of the others.
    """
    weights: Counter[Factor] = Counter()
    for linear in space:
        weights[_role(linear)] += max(linear.kept.values())
    total, largest = weights.total(), max(weights, key=lambda role: weights[role])
    shares = {role: count / total for role, count in weights.items() if role != largest}
    return shares | ({DEPTH: 1.0} if len({linear.decoder_layer for linear in space}) > 1 else {})


def first_candidates(space: Sequence[LinearSpace]) -> int:
    """Return how many candidates `search_profile` scores in its first call: they do not depend on each other."""
    return 1 + len(hadamard(len(factors_of(space)) + 1))


def most_candidates(space: Sequence[LinearSpace]) -> int:
    """Return how many candidates `search_profile` scores at most."""
    return first_candidates(space) + MAX_STEPS


def search_profile(
    space: Sequence[LinearSpace], kls_of: Callable[[Sequence[Candidate]], list[float]], budget: int
) -> None:
    """Score candidates, the uniform one first.

    The effects of all factors are measured together, with one candidate per row of a Hadamard matrix that has a column
    for each factor. Then steps of growing length against these effects are scored until one is worse than the one
    before.

    Args:
        space: the linear layers and their levels.
        kls_of: prunes the model to candidates, and scores them; those of one call do not depend on each other.
        budget: the weights that a candidate may keep.
    """
    shares = factors_of(space)
    signs = [dict(zip(shares, row[1:], strict=False)) for row in hadamard(len(shares) + 1)]
    shifted = [{factor: STEP * sign for factor, sign in row.items()} for row in signs]
    _, *kls = kls_of([(0,) * len(space), *(fitted(space, shifts, budget) for shifts in shifted)])
    losses = [math.log(max(kl, math.ulp(0.0))) for kl in kls]
    # A factor that changes few weights takes few from the others, so its step is divided by the root of its share.
    step = {
        factor: -sum(loss * row[factor] for loss, row in zip(losses, signs, strict=True)) / share**0.5
        for factor, share in shares.items()
    }
    longest = max(map(abs, step.values()), default=0.0) or 1.0
    before = math.inf
    for length in range(1, MAX_STEPS + 1):
        shifts = {factor: length * STEP * by / longest for factor, by in step.items()}
        (kl,) = kls_of([fitted(space, shifts, budget)])
        if kl > before:
            break
        before = kl


def fitted(space: Sequence[LinearSpace], shifts: Shifts, budget: int) -> Candidate:
    """Return the candidate of a profile.

    In addition to its shift, every linear layer is moved by the same offset. The offset is the one with which the
    candidate keeps at most ``budget`` weights, and fewer only by less than a level of the smallest linear layer.
    """
    last = max(linear.decoder_layer for linear in space) or 1
    wanted = [
        (shifts.get(_role(linear), 0.0) + shifts.get(DEPTH, 0.0) * (2 * linear.decoder_layer / last - 1))
        for linear in space
    ]
    lowest, highest = -2.0 * 64 - max(wanted), 2.0 * 64 - min(wanted)
    for _ in range(60):
        middle = (lowest + highest) / 2
        kept = kept_weights(space, _levels(space, wanted, middle))
        lowest, highest = (lowest, middle) if kept > budget else (middle, highest)
    levels = _levels(space, wanted, lowest)
    room = budget - kept_weights(space, levels)
    rest = [_level(linear, by, lowest) - level for linear, by, level in zip(space, wanted, levels, strict=True)]
    for index in sorted(range(len(space)), key=lambda index: -rest[index]):
        kept_at, denser = space[index].kept, levels[index] + 1
        if denser in kept_at and kept_at[denser] - kept_at[denser - 1] <= room:
            room -= kept_at[denser] - kept_at[denser - 1]
            levels[index] = denser
    return tuple(levels)


def hadamard(least: int) -> list[list[int]]:
    """Return Sylvester's Hadamard matrix of at least ``least`` rows: 1 and -1, its columns orthogonal."""
    rows = [[1]]
    while len(rows) < least:
        rows = [row + row for row in rows] + [row + [-sign for sign in row] for row in rows]
    return rows


def _role(linear: LinearSpace) -> Factor:
    return ".".join("*" if part.isdecimal() else part for part in linear.name_in_layer.split("."))


def _level(linear: LinearSpace, shift: float, offset: float) -> float:
    """Return the level, not rounded, that is ``shift + offset`` 64ths from the uniform one, or the nearest possible.

    Where the first stride is rounded (`STAGE_STRIDES`), a 64th is a quarter of it.
    """
    level = (shift + offset) * linear.strides[0] / STAGE_STRIDES[0]
    return min(max(level, min(linear.kept)), max(linear.kept))


def _levels(space: Sequence[LinearSpace], shifts: Sequence[float], offset: float) -> list[int]:
    return [math.floor(_level(linear, shift, offset)) for linear, shift in zip(space, shifts, strict=True)]

"""The search space: a level of density per linear layer, and mutations that keep the total number of kept weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from semisparse.compress.layers import DecoderLayer
from semisparse.patterns import Pattern

STAGE_STRIDES = (4, 2, 1)
"""Stride of each search stage, coarse to fine, in 64ths of `Pattern.levels` (RheoSparse, section III B). It is rounded
to whole levels, at least one: 4, 2, 1 for 50%; 1, 1, 1 for 6:8."""

MAX_MOVES = 8
"""Maximum moves per attempt of `switch_levels`. Two are enough if a level is the same number of weights everywhere.
More are needed between shapes, and where the window does not divide K (8:10 at K = 4096)."""

ATTEMPTS = 1000
"""Random attempts of `switch_levels` before it gives up."""

Candidate = tuple[int, ...]
"""A level for each linear layer, in the order of the search space."""


@dataclass(frozen=True)
class LinearSpace:
    """The levels that a search may give to one linear layer.

    A level is a number of steps of `Pattern.shifted` from the uniform pattern: negative is sparser, positive denser.

    Args:
        name: module name of the linear layer in the model.
        decoder_layer: index of its decoder layer.
        name_in_layer: its module name in the decoder layer, the same for all linear layers of one type.
        patterns: pattern by level; level 0 is the uniform pattern itself. `search_space` leaves no gaps between levels,
            `restricted_to` does.
        kept: number of kept weights by level.
        strides: the stride of each search stage, in levels.
    """

    name: str
    decoder_layer: int
    name_in_layer: str
    patterns: Mapping[int, Pattern]
    kept: Mapping[int, int]
    strides: tuple[int, ...]

    def restricted_to(self, centre: int, stage: int, steps: int) -> LinearSpace:
        """Return this space with only the levels ``centre + i * stride``, for i from ``-steps`` to ``steps``.

        The stride is that of search stage ``stage``.
        """
        levels = {centre + step * self.strides[stage] for step in range(-steps, steps + 1)}
        patterns = {level: pattern for level, pattern in self.patterns.items() if level in levels}
        return replace(self, patterns=patterns, kept={level: self.kept[level] for level in patterns})


def search_space(layers: Sequence[DecoderLayer], reach: int, can_store: Callable[[Pattern], bool]) -> list[LinearSpace]:
    """Return the search space: one `LinearSpace` per linear layer.

    In each direction the levels end ``reach * sum(strides)`` from level 0, or before the first one that is no pattern
    or cannot be stored.

    Args:
        layers: the decoder layers, each with the uniform pattern of its linear layers.
        reach: maximum distance from level 0, in sums of all stages' strides.
        can_store: whether the format can store a pattern.
    """
    space = []
    for index, layer in enumerate(layers):
        for name, pattern in layer.patterns.items():
            n, k = layer.weight(name).shape
            strides = tuple(max(1, round(stride * pattern.levels((n, k)) / 64)) for stride in STAGE_STRIDES)
            patterns = {0: pattern}
            for direction in (-1, 1):
                for level in range(direction, direction * (reach * sum(strides) + 1), direction):
                    shifted = pattern.shifted(level, (n, k))
                    if shifted is None or not can_store(shifted):
                        break
                    patterns[level] = shifted
            kept = {level: pattern.kept((n, k)) for level, pattern in patterns.items()}
            space.append(LinearSpace(layer.full_name(name), index, name, patterns, kept, strides))
    return space


def kept_weights(space: Sequence[LinearSpace], levels: Sequence[int]) -> int:
    """Return the number of weights that a candidate's levels keep."""
    return sum(linear.kept[level] for linear, level in zip(space, levels, strict=True))


def switch_levels(
    space: Sequence[LinearSpace], candidate: Candidate, stage: int, rng: random.Random
) -> Candidate | None:
    """Mutate a candidate: make some linear layers sparser and others denser by the same number of weights.

    Each move changes a random linear layer by one stride of the stage: it becomes denser if the moves so far removed
    more weights than they added, else sparser. An attempt succeeds once as many weights were added as removed, and not
    zero; it fails after `MAX_MOVES`. A linear layer moves in one direction only.

    Args:
        space: all linear layers.
        candidate: the levels before the mutation.
        stage: index of the search stage, whose strides the moves have.
        rng: where the choices come from.
    Returns:
        The new candidate; None if every attempt failed.
    """
    for _ in range(ATTEMPTS):
        levels = list(candidate)
        removed = 0  # weights removed minus weights added
        for _ in range(MAX_MOVES):
            direction = 1 if removed > 0 else -1
            moves = [
                (index, levels[index] + direction * linear.strides[stage])
                for index, linear in enumerate(space)
                if levels[index] + direction * linear.strides[stage] in linear.kept
                and (levels[index] - candidate[index]) * direction >= 0
            ]
            if not moves:
                break
            index, level = rng.choice(moves)
            change = space[index].kept[levels[index]] - space[index].kept[level]
            removed += change
            levels[index] = level
            if removed == 0 and change:  # where a weight has few columns, a move may change nothing
                return tuple(levels)
    return None

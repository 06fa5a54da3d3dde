"""The search space: sparsity levels per linear layer, and mutations that keep the number of weights exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from semisparse.compress.propagate import DecoderLayer
from semisparse.patterns import Pattern

STAGE_STRIDES = (4, 2, 1)
"""Stride of each search stage, coarse to fine, in 64ths of a linear layer's weights (RheoSparse, section III B)."""

MAX_MOVES = 8
"""Moves per `switch_levels` at most. Two are enough between linear layers of one shape; other shapes need more."""

ATTEMPTS = 1000
"""Random attempts of `switch_levels` before it gives up."""

Candidate = tuple[int, ...]
"""A level for each linear layer, in order."""


@dataclass(frozen=True)
class LayerSpace:
    """The levels that a search may give to one linear layer: steps of `Pattern.shifted` from the uniform pattern.

    Args:
        name: module name of the linear layer in the model.
        decoder_layer: index of its decoder layer.
        segment: its name in the decoder layer, which is the same for linear layers of one type.
        patterns: by level, without gaps; level 0 is the uniform pattern itself.
        kept: number of kept weights by level.
        strides: levels per stride of each stage.
    """

    name: str
    decoder_layer: int
    segment: str
    patterns: Mapping[int, Pattern]
    kept: Mapping[int, int]
    strides: tuple[int, ...]

    def near(self, level: int, stage: int, steps: int) -> LayerSpace:
        """Return only the levels up to ``steps`` strides of a stage away from ``level``."""
        wanted = {level + step * self.strides[stage] for step in range(-steps, steps + 1)}
        patterns = {other: pattern for other, pattern in self.patterns.items() if other in wanted}
        return replace(self, patterns=patterns, kept={other: self.kept[other] for other in patterns})


def search_space(layers: Sequence[DecoderLayer], reach: int, accepts: Callable[[Pattern], bool]) -> list[LayerSpace]:
    """Return the search space: one `LayerSpace` per linear layer.

    Args:
        layers: with the uniform patterns.
        reach: distance of the extreme levels from the uniform one, in units of the sum of all stages' strides.
        accepts: whether the format can store a pattern.
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
                    if shifted is None or not accepts(shifted):
                        break
                    patterns[level] = shifted
            kept = {level: each.kept((n, k)) for level, each in patterns.items()}
            space.append(LayerSpace(layer.full_name(name), index, name, patterns, kept, strides))
    return space


def kept_weights(space: Sequence[LayerSpace], candidate: Candidate) -> int:
    """Return the number of weights that a candidate keeps."""
    return sum(layer.kept[level] for layer, level in zip(space, candidate, strict=True))


def switch_levels(
    space: Sequence[LayerSpace], candidate: Candidate, stage: int, rng: random.Random
) -> Candidate | None:
    """Mutate a candidate: make some linear layers sparser and others denser by the same number of weights.

    Each move changes a random linear layer by one stride of the stage. The first move makes one sparser; each next move
    goes in the direction that has moved fewer weights, until both have moved the same number.

    Returns:
        The new candidate; None if no attempt came out even.
    """
    for _ in range(ATTEMPTS):
        levels = list(candidate)
        freed = 0
        for _ in range(MAX_MOVES):
            direction = 1 if freed > 0 else -1
            moves = [
                (index, levels[index] + direction * layer.strides[stage])
                for index, layer in enumerate(space)
                if levels[index] + direction * layer.strides[stage] in layer.kept
                and (levels[index] - candidate[index]) * direction >= 0
            ]
            if not moves:
                break
            index, level = rng.choice(moves)
            change = space[index].kept[levels[index]] - space[index].kept[level]
            freed += change
            levels[index] = level
            if freed == 0 and change:  # in a short window a move may change nothing
                return tuple(levels)
    return None

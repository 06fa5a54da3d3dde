"""What a search chooses from: a level for each layer, and the exchanges between layers that keep the budget exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from semisparse.compress.walk import Block
from semisparse.patterns import Pattern

SHARES = (4, 2, 1)
"""Steps of the stages, coarse to fine, in 64ths of a layer's weights (RheoSparse, section III B)."""

LONGEST_EXCHANGE = 8
"""Single moves in an exchange at most. Two suffice between layers of one shape; layers of other shapes need more."""

ATTEMPTS = 1000
"""Exchanges begun at random before a search says that there is none."""

Levels = tuple[int, ...]
"""For each layer, in order, how many steps it lies above the uniform pattern, or below."""


@dataclass(frozen=True)
class Choice:
    """The levels of one layer.

    Args:
        name: the layer's module name in the model.
        block: index of its decoder block.
        segment: its name in the block: layers of one segment do the same job in different blocks.
        patterns: by level, without gaps; 0 is the uniform one.
        kept: by level, the weights kept.
        strides: levels in a step of each stage.
    """

    name: str
    block: int
    segment: str
    patterns: Mapping[int, Pattern]
    kept: Mapping[int, int]
    strides: tuple[int, ...]

    def near(self, level: int, stage: int, steps: int) -> Choice:
        """Give the choice between the levels up to so many steps of a stage away from one."""
        around = {level + step * self.strides[stage] for step in range(-steps, steps + 1)}
        patterns = {found: pattern for found, pattern in self.patterns.items() if found in around}
        return replace(self, patterns=patterns, kept={found: self.kept[found] for found in patterns})


def list_choices(blocks: Sequence[Block], reach: int, accepts: Callable[[Pattern], bool]) -> list[Choice]:
    """List what may be chosen for each layer.

    Args:
        blocks: with the uniform patterns.
        reach: how far from these the levels lead: so many steps of every stage.
        accepts: whether a pattern can be stored.
    """
    choices = []
    for index, block in enumerate(blocks):
        for name, pattern in block.patterns.items():
            n, k = block.weight(name).shape
            strides = tuple(max(1, round(share * pattern.levels((n, k)) / 64)) for share in SHARES)
            patterns = {0: pattern}
            for direction in (-1, 1):
                for level in range(direction, direction * (reach * sum(strides) + 1), direction):
                    moved = pattern.shifted(level, (n, k))
                    if moved is None or not accepts(moved):
                        break
                    patterns[level] = moved
            kept = {level: found.kept((n, k)) for level, found in patterns.items()}
            choices.append(Choice(block.full_name(name), index, name, patterns, kept, strides))
    return choices


def kept_weights(choices: Sequence[Choice], levels: Levels) -> int:
    """Count the weights that a candidate keeps."""
    return sum(choice.kept[level] for choice, level in zip(choices, levels, strict=True))


def exchange(choices: Sequence[Choice], levels: Levels, stage: int, rng: random.Random) -> Levels | None:
    """Move weights from some layers to others, the same number, by single steps of the stage in random layers.

    The first step lowers a layer; then the side that moved fewer weights goes on until both moved the same number.

    Returns:
        The new levels; None if no exchange was found.
    """
    for _ in range(ATTEMPTS):
        moved = list(levels)
        freed = 0
        for _ in range(LONGEST_EXCHANGE):
            direction = 1 if freed > 0 else -1
            steps = [
                (index, moved[index] + direction * choice.strides[stage])
                for index, choice in enumerate(choices)
                if moved[index] + direction * choice.strides[stage] in choice.kept
                and (moved[index] - levels[index]) * direction >= 0
            ]
            if not steps:
                break
            index, level = rng.choice(steps)
            change = choices[index].kept[moved[index]] - choices[index].kept[level]
            freed += change
            moved[index] = level
            if freed == 0 and change:  # in a short window a step may change nothing
                return tuple(moved)
    return None

"""What every search is: generations that lead from one state to the next, each all that is needed to go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import Scorer
from semisparse.compress.search.space import Choice, Levels


@dataclass(frozen=True)
class State:
    """A search between two generations.

    Args:
        generation: generations finished.
        best: the best candidate.
        kl: its mean KL on the search's tokens, in nats a token.
        uniform_kl: that of the uniform patterns.
        pool: the candidates that the next generation descends from.
        evaluations: candidates scored so far, on some of the tokens or all.
        tokens: tokens that these were run on.
    """

    generation: int
    best: Levels
    kl: float
    uniform_kl: float
    pool: tuple[Levels, ...]
    evaluations: int
    tokens: int

    @classmethod
    def start(cls, uniform: Levels, kl: float = math.inf) -> State:
        """Begin with the uniform patterns and their KL, if it is known."""
        return cls(0, uniform, kl, kl, (), 0, 0)

    def to_json(self) -> dict[str, Any]:
        """Give plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, notes: dict[str, Any]) -> State:
        """Read what `to_json` gave."""
        pool = tuple(tuple(levels) for levels in notes["pool"])
        return cls(**{**notes, "best": tuple(notes["best"]), "pool": pool})


class Algorithm(Protocol):
    """A way to search, in passes of some generations each; an object of it lives through one pass, with its bank."""

    generations: int
    """Of all passes."""

    end: int
    """The generation with which the next pass begins."""

    def __init__(self, choices: Sequence[Choice], scorer: Scorer, recipe: Recipe, seed: int, number: int) -> None: ...

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Count the passes."""

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Say how far levels lead from the uniform one: so many steps of every stage."""

    @staticmethod
    def offered(choices: Sequence[Choice], best: Levels, number: int, recipe: Recipe) -> list[Choice]:
        """Give what a pass, by its number, chooses from, given the best candidate before it."""

    def live(self, state: State) -> State:
        """Live through one generation; what it counts, apart from evaluations, is counted by the caller."""

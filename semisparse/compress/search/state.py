"""The interface of search algorithms: generations, each of which turns one state into the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import Scorer
from semisparse.compress.search.space import Candidate, LinearSpace


@dataclass(frozen=True)
class State:
    """The state of a search between two generations: all that is needed to resume it.

    Args:
        generation: number of finished generations.
        best: the best candidate so far.
        kl: its mean KL divergence on the search's tokens, in nats per token.
        uniform_kl: the same for the uniform patterns.
        pool: candidates that the next generation descends from.
        evaluations: candidates scored so far, on all or some of the tokens.
        tokens: tokens run through the model for that.
    """

    generation: int
    best: Candidate
    kl: float
    uniform_kl: float
    pool: tuple[Candidate, ...]
    evaluations: int
    tokens: int

    @classmethod
    def start(cls, uniform: Candidate, kl: float = math.inf) -> State:
        """Return the initial state: the uniform candidate, and its KL if it is known."""
        return cls(0, uniform, kl, kl, (), 0, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> State:
        """Return the state that `to_json` wrote."""
        pool = tuple(tuple(candidate) for candidate in values["pool"])
        return cls(**{**values, "best": tuple(values["best"]), "pool": pool})


class Algorithm(Protocol):
    """A search algorithm. It runs in passes: each has its own bank of pruned weights, its own object, and generations.

    Args:
        space: as `pass_space` returns it for the pass.
        scorer: scores candidates in this space.
        recipe: the settings of the search.
        seed: seed of everything drawn at random.
        number: number of the pass, from 0.
    """

    generations: int
    """Number of generations of all passes together."""

    end: int
    """Number of generations after which the pass ends, counted from the first pass's start."""

    def __init__(
        self, space: Sequence[LinearSpace], scorer: Scorer, recipe: Recipe, seed: int, number: int
    ) -> None: ...

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Return the number of passes."""

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Return the maximum distance of a level from level 0, as in `search_space`."""

    @staticmethod
    def pass_space(space: Sequence[LinearSpace], best: Candidate, number: int, recipe: Recipe) -> list[LinearSpace]:
        """Return the part of the search space that pass ``number`` explores, given the best candidate before it."""

    def next_generation(self, state: State) -> State:
        """Run one generation; the caller updates `State.generation` and `State.tokens`."""

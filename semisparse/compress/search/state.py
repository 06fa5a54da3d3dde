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
        kl: its mean KL divergence from the dense model on the search's calibration tokens, in nats per token.
        uniform_kl: the same for the uniform candidate, in which every layer has the recipe's own density.
        pool: the parents of the next generation.
        evaluations: candidates scored so far, on all or some of the tokens.
        tokens: tokens run through the model to score them.
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
        """Return the initial state: the uniform candidate, and its KL; infinity if it is not known yet."""
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
    """A search algorithm, as an object for one of its passes.

    Each pass prunes the layers anew, to the levels of density that it chooses among, and runs some generations.

    Args:
        space: the levels of the pass, from `pass_space`.
        scorer: scores candidates in this space.
        recipe: the settings of the search.
        seed: of the random generators.
        number: index of the pass, from 0.
    """

    generations: int
    """Number of generations of all passes together."""

    end: int
    """The value of `State.generation` at which the pass ends."""

    def __init__(
        self, space: Sequence[LinearSpace], scorer: Scorer, recipe: Recipe, seed: int, number: int
    ) -> None: ...

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Return the number of passes."""

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Return how far layers can move from the uniform density; 1 is one stride of every stage (`search_space`)."""

    @staticmethod
    def pass_space(space: Sequence[LinearSpace], best: Candidate, number: int, recipe: Recipe) -> list[LinearSpace]:
        """Return the part of the search space that pass ``number`` explores around the best candidate so far."""

    def next_generation(self, state: State) -> State:
        """Run one generation and return the new state. The caller sets its `generation` and `tokens`."""

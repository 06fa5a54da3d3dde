"""What every search is: generations that lead from one state to the next, each all that is needed to go on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from semisparse.compress.search.space import Levels


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
    def start(cls, uniform: Levels, kl: float) -> State:
        """Begin with the uniform patterns and their KL."""
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
    """A way to search."""

    @property
    def generations(self) -> int:
        """Count the generations it lives through."""

    def live(self, state: State) -> State:
        """Live through one generation; what it counts, apart from evaluations, is counted by the caller."""

"""``8:32v32``: keep 8 of every 32 vectors along K; a vector is 32 consecutive output rows of one column."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from semisparse.errors import PatternError
from semisparse.patterns.base import blocks_along
from semisparse.patterns.nm import NM, Windowed


@dataclass(frozen=True)
class VectorNM(Windowed):
    """Keep ``keep`` of every ``window`` vectors along K; a vector is ``length`` consecutive rows (NM-SpMM).

    Where ``length`` does not divide N, the last rows form shorter vectors. A short last window is as in `NM`.
    """

    length: int

    forms: ClassVar[str] = "KEEP:WINDOWvLENGTH (8:32v32 keeps 8 of every 32 vectors of 32 rows)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise PatternError(f"pattern {self}: a vector has at least one row")

    @classmethod
    def parse(cls, text: str) -> VectorNM | None:
        match = re.fullmatch(r"([0-9]+):([0-9]+)v([0-9]+)", text)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None

    def mask(self, scores: Tensor) -> Tensor:
        vectors = blocks_along(scores, self.length, dim=0).sum(1)
        return self._over_vectors.mask(vectors).repeat_interleave(self.length, dim=0)[: scores.shape[0]]

    def violation(self, nonzero: Tensor) -> str | None:
        length = min(self.length, nonzero.shape[0])
        violation = self._over_vectors.violation(blocks_along(nonzero, length, dim=0).any(1))
        return f"counting non-zero vectors of {self.length} rows: vector {violation}" if violation else None

    @property
    def _over_vectors(self) -> NM:
        """The pattern of the matrix [ceil(N / length), K] that has one entry per vector."""
        return NM(self.keep, self.window)

    def __str__(self) -> str:
        return f"{self.keep}:{self.window}v{self.length}"

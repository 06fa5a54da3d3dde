"""``8:32v32``: of each 32 vectors along K keep 8; a vector is 32 consecutive output rows at one column."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern, blocks_along
from semisparse.patterns.nm import NM


@dataclass(frozen=True)
class VectorNM(Pattern):
    """Keep ``keep`` of every ``window`` vectors along K, a vector being ``length`` consecutive rows (NM-SpMM).

    The last rows form a shorter vector where ``length`` does not divide N; the tail along K is that of `NM`.
    """

    keep: int
    window: int
    length: int

    forms: ClassVar[str] = "KEEP:WINDOWvLENGTH (8:32v32 keeps 8 of every 32 vectors of 32 rows)"

    def __post_init__(self) -> None:
        NM(self.keep, self.window)
        if self.length < 1:
            raise PatternError(f"pattern {self}: a vector has at least one row")

    @classmethod
    def parse(cls, text: str) -> VectorNM | None:
        found = re.fullmatch(r"(\d+):(\d+)v(\d+)", text)
        return cls(int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def density(self) -> float:
        return self.keep / self.window

    @property
    def step(self) -> int:
        return self.window

    def kept(self, shape: tuple[int, int]) -> int:
        return self._along_k.kept(shape)

    def levels(self, shape: tuple[int, int]) -> int:
        return self.window

    def shifted(self, steps: int, shape: tuple[int, int]) -> VectorNM | None:
        moved = self._along_k.shifted(steps, shape)
        return replace(self, keep=moved.keep) if moved else None

    def unrestricted(self) -> VectorNM:
        return replace(self, keep=self.window)

    def mask(self, scores: Tensor) -> Tensor:
        vectors = blocks_along(scores, self.length, dim=0).sum(1)
        return self._along_k.mask(vectors).repeat_interleave(self.length, dim=0)[: scores.shape[0]]

    def violation(self, nonzero: Tensor) -> str | None:
        vectors = blocks_along(nonzero, self.length, dim=0).any(1)
        found = self._along_k.violation(vectors)
        return f"counting vectors of {self.length} rows, vector {found}" if found else None

    @property
    def _along_k(self) -> NM:
        return NM(self.keep, self.window)

    def __str__(self) -> str:
        return f"{self.keep}:{self.window}v{self.length}"

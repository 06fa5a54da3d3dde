"""``70%``: any 70 % of the matrix's weights are zero; ``70%/row``: 70 % of each row's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern, top_overall, top_per_row

LEVELS = 64
"""Maximum number of levels: a step is 1/64 of the weights, as for n:64, rounded down to whole weights."""


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Prune ``percent`` % of the weights of the whole matrix, or of each row (``by_row``)."""

    percent: float
    by_row: bool = False

    forms: ClassVar[str] = "PERCENT% or PERCENT%/row (70% makes 70 % of the weights zero)"

    def __post_init__(self) -> None:
        if not 0 <= self.percent < 100:
            raise PatternError(f"pattern {self}: the percentage of zeros is at least 0 and below 100")

    @classmethod
    def parse(cls, text: str) -> Unstructured | None:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%(/row)?", text)
        return cls(float(match[1]), match[2] is not None) if match else None

    @property
    def density(self) -> float:
        return 1 - self.percent / 100

    @property
    def step(self) -> int:
        return 1

    def kept(self, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return rows * self._kept(columns) if self.by_row else self._kept(rows * columns)

    def levels(self, shape: tuple[int, int]) -> int:
        return min(LEVELS, self._budget_size(shape))

    def shifted(self, steps: int, shape: tuple[int, int]) -> Unstructured | None:
        size = self._budget_size(shape)
        pruned = size - self._kept(size) - steps * (size // self.levels(shape))
        if not 0 <= pruned < size:
            return None
        return replace(self, percent=float(f"{100 * pruned / size:.12g}"))  # as in __str__

    def mask(self, scores: Tensor) -> Tensor:
        if self.by_row:
            return top_per_row(scores, self._kept(scores.shape[1]))
        return top_overall(scores, self._kept(scores.numel()))

    def violation(self, nonzero: Tensor) -> str | None:
        """Describe the first violation, or return None.

        One more weight per row than the exact count is accepted: pruners round the count in each block of columns.
        """
        rows, columns = nonzero.shape
        counts = nonzero.sum(1)
        if self.by_row:
            bad = (counts > self._kept(columns) + 1).nonzero()
            if not len(bad):
                return None
            row = int(bad[0])
            return f"row {row} holds {int(counts[row])} non-zeros of {columns}, {self._kept(columns)} are allowed"
        total, allowed = int(counts.sum()), self._kept(nonzero.numel())
        if total <= allowed + rows:
            return None
        row = int((counts.cumsum(0) > allowed).nonzero()[0])
        return f"{total} of {nonzero.numel()} weights are non-zero, {allowed} are allowed (exceeded in row {row})"

    def _budget_size(self, shape: tuple[int, int]) -> int:
        """Return how many weights ``percent`` refers to."""
        return shape[1] if self.by_row else shape[0] * shape[1]

    def _kept(self, count: int) -> int:
        return count - round(count * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.percent:.12g}%" + ("/row" if self.by_row else "")

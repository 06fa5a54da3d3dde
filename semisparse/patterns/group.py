"""``g16@50%``: prune half of the groups of 16 consecutive weights along K."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern, blocks_along
from semisparse.patterns.unstructured import Unstructured


@dataclass(frozen=True)
class Group(Pattern):
    """Prune ``percent`` % of the 1 x ``size`` groups, those of least saliency, as in GQSA.

    They are counted over the whole matrix, or in each row if ``by_row``. A group's saliency is the mean score of its
    weights. Where ``size`` does not divide K, a row's last group is shorter.
    """

    size: int
    percent: float
    by_row: bool = False

    forms: ClassVar[str] = "gSIZE@PERCENT% or gSIZE@PERCENT%/row (g16@50% prunes half of the groups of 16 along K)"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PatternError(f"pattern {self}: SIZE must be at least 1")
        Unstructured(self.percent)

    @classmethod
    def parse(cls, text: str) -> Group | None:
        match = re.fullmatch(r"g([0-9]+)@([0-9]+(?:\.[0-9]+)?)%(/row)?", text)
        return cls(int(match[1]), float(match[2]), match[3] is not None) if match else None

    @property
    def density(self) -> float:
        return self._over_groups.density

    @property
    def step(self) -> int:
        return self.size

    def kept(self, shape: tuple[int, int]) -> int:
        return self._over_groups.kept(self._groups(shape)) * self.size

    def levels(self, shape: tuple[int, int]) -> int:
        return self._over_groups.levels(self._groups(shape))

    def shifted(self, steps: int, shape: tuple[int, int]) -> Group | None:
        pattern = self._over_groups.shifted(steps, self._groups(shape))
        return replace(self, percent=pattern.percent) if pattern else None

    def unrestricted(self) -> Group:
        return replace(self, percent=0)

    def mask(self, scores: Tensor) -> Tensor:
        columns = scores.shape[1]
        sizes = blocks_along(torch.ones_like(scores[:1]), self.size, dim=1).sum(-1)
        saliency = blocks_along(scores, self.size, dim=1).sum(-1) / sizes
        return self._over_groups.mask(saliency).repeat_interleave(self.size, dim=1)[:, :columns]

    def violation(self, nonzero: Tensor) -> str | None:
        size = min(self.size, nonzero.shape[1])
        violation = self._over_groups.violation(blocks_along(nonzero, size, dim=1).any(-1))
        return f"in the matrix with a column per group of {self.size}: {violation}" if violation else None

    def _groups(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and the groups per row."""
        return shape[0], -(-shape[1] // self.size)

    @property
    def _over_groups(self) -> Unstructured:
        """The unstructured pattern of the mask of groups [rows, groups per row]."""
        return Unstructured(self.percent, self.by_row)

    def __str__(self) -> str:
        return f"g{self.size}@{self._over_groups}"

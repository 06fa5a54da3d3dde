"""``g16@50%``: half of the groups of 16 consecutive weights along K are dropped whole."""

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
    """Drop a share of the 1 x ``size`` groups: over the whole matrix, or the same share of each row (GQSA).

    Where ``size`` does not divide K, the last group of a row is shorter.
    """

    size: int
    percent: float
    by_row: bool = False

    forms: ClassVar[str] = "gSIZE@PERCENT% or gSIZE@PERCENT%/row (g16@50% drops half of the groups of 16 along K)"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PatternError(f"pattern {self}: a group has at least one weight")
        Unstructured(self.percent)

    @classmethod
    def parse(cls, text: str) -> Group | None:
        found = re.fullmatch(r"g(\d+)@(\d+(?:\.\d+)?)%(/row)?", text)
        return cls(int(found[1]), float(found[2]), found[3] is not None) if found else None

    @property
    def density(self) -> float:
        return 1 - self.percent / 100

    @property
    def step(self) -> int:
        return self.size

    def kept(self, shape: tuple[int, int]) -> int:
        return self._over_groups.kept(self._groups(shape)) * self.size

    def levels(self, shape: tuple[int, int]) -> int:
        return self._over_groups.levels(self._groups(shape))

    def shifted(self, steps: int, shape: tuple[int, int]) -> Group | None:
        moved = self._over_groups.shifted(steps, self._groups(shape))
        return replace(self, percent=moved.percent) if moved else None

    def unrestricted(self) -> Group:
        return replace(self, percent=0)

    def mask(self, scores: Tensor) -> Tensor:
        columns = scores.shape[1]
        members = blocks_along(torch.ones_like(scores[:1]), self.size, dim=1).sum(-1)
        saliency = blocks_along(scores, self.size, dim=1).sum(-1) / members
        return self._over_groups.mask(saliency).repeat_interleave(self.size, dim=1)[:, :columns]

    def violation(self, nonzero: Tensor) -> str | None:
        found = self._over_groups.violation(blocks_along(nonzero, self.size, dim=1).any(-1))
        return f"counting groups of {self.size}, {found}" if found else None

    def _groups(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], -(-shape[1] // self.size)

    @property
    def _over_groups(self) -> Unstructured:
        return Unstructured(self.percent, self.by_row)

    def __str__(self) -> str:
        return f"g{self.size}@{self._over_groups}"

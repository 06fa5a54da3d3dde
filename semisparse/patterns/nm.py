"""``6:8``: keep 6 of every 8 consecutive weights along K, in each row."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from semisparse.errors import PatternError
from semisparse.patterns.base import Pattern, blocks_along, top_per_row


@dataclass(frozen=True)
class Windowed(Pattern):
    """The base class of N:M and vector-wise N:M, which keep ``keep`` of every ``window`` columns."""

    keep: int
    window: int

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.window:
            raise PatternError(
                f"pattern {self.keep}:{self.window}: KEEP:WINDOW counts the kept weights, 1 to {self.window}"
            )

    @property
    def density(self) -> float:
        return self.keep / self.window

    @property
    def step(self) -> int:
        return self.window

    def kept(self, shape: tuple[int, int]) -> int:
        rows, columns = shape
        windows, tail = divmod(columns, self.window)
        return rows * (windows * self.keep + self._kept_of(tail))

    def levels(self, shape: tuple[int, int]) -> int:
        return self.window

    def shifted(self, steps: int, shape: tuple[int, int]) -> Pattern | None:
        keep = self.keep + steps
        return replace(self, keep=keep) if 1 <= keep <= self.window else None

    def unrestricted(self) -> Pattern:
        return replace(self, keep=self.window)

    def _kept_of(self, tail: int) -> int:
        """Return how many of the ``tail`` columns of a short last window are kept."""
        return -(-self.keep * tail // self.window)


@dataclass(frozen=True)
class NM(Windowed):
    """Keep at most ``keep`` of every ``window`` weights along K.

    Where ``window`` does not divide K, the last window is short. `mask` keeps the same fraction of it, rounded up.
    `check` accepts up to ``keep`` non-zeros in it, as if zeros padded it.
    """

    forms: ClassVar[str] = "KEEP:WINDOW (6:8 keeps 6 of every 8 along K)"

    @classmethod
    def parse(cls, text: str) -> NM | None:
        match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
        return cls(int(match[1]), int(match[2])) if match else None

    def mask(self, scores: Tensor) -> Tensor:
        columns = scores.shape[1]
        whole = columns - columns % self.window
        head = top_per_row(scores[:, :whole].unflatten(1, (whole // self.window, self.window)), self.keep).flatten(1)
        if whole == columns:
            return head
        tail = top_per_row(scores[:, whole:], self._kept_of(columns - whole))
        return torch.cat((head, tail), dim=1)

    def violation(self, nonzero: Tensor) -> str | None:
        window = min(self.window, nonzero.shape[1])  # a wider one would be padded to its width
        counts = blocks_along(nonzero, window, dim=1).sum(-1)
        bad = (counts > self.keep).nonzero()
        if not len(bad):
            return None
        row, block = bad[0].tolist()
        first = block * window
        last = min(first + window, nonzero.shape[1]) - 1
        return (
            f"row {row}, columns {first} to {last} (block {block}) hold {int(counts[row, block])} non-zeros, "
            f"at most {self.keep} are allowed"
        )

    def __str__(self) -> str:
        return f"{self.keep}:{self.window}"

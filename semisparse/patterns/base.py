"""What a pattern is: which weights of ``w[N, K]`` may be non-zero."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import PatternError


class Pattern(ABC):
    """Which weights may be non-zero. ``str(pattern)`` is its written form and parses back to an equal pattern."""

    forms: ClassVar[str]
    """How the family is written, for error messages and help."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Pattern | None:
        """Read the family's written form; None if ``text`` is not of this family.

        Raises:
            PatternError: ``text`` is of this family but its numbers are impossible.
        """

    @property
    @abstractmethod
    def density(self) -> float:
        """Nominal share of weights kept, 0 to 1."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Columns that must be decided together: an algorithm that walks along K may stop at multiples of it."""

    @abstractmethod
    def kept(self, shape: tuple[int, int]) -> int:
        """Count the weights that `mask` keeps of N, K = ``shape``; a short group counts as a whole one."""

    @abstractmethod
    def levels(self, shape: tuple[int, int]) -> int:
        """Count the steps of `shifted` from nothing kept to everything for N, K = ``shape``, rounded down."""

    @abstractmethod
    def shifted(self, steps: int, shape: tuple[int, int]) -> Pattern | None:
        """Give the pattern of the same family that keeps more.

        Args:
            steps: how much more, in the smallest steps that the family has; negative for less.
            shape: N, K of the weight.
        Returns:
            The pattern; None if it would keep nothing or more than everything.
        """

    @abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """Choose the weights to keep.

        Args:
            scores: [N, K] float, the higher the more worth keeping; ties go to the lower column.
        Returns:
            [N, K] bool, True where the weight stays.
        """

    @abstractmethod
    def violation(self, nonzero: Tensor) -> str | None:
        """Say where ``nonzero`` ([N, K] bool) first breaks the pattern, or None if it obeys."""

    def unrestricted(self) -> Pattern | None:
        """Return the pattern of the same family that every weight obeys; None if the family has none."""
        return None

    def of_part(self) -> tuple[Pattern, ...]:
        """Return what a part of a weight may be declared as, the strictest first: as the whole, or as any weight."""
        from semisparse.patterns.unstructured import Unstructured  # a Pattern itself

        loosest = self.unrestricted()
        return (self, Unstructured(0), *([] if loosest is None else [loosest]))

    def check(self, weight: Tensor) -> None:
        """Raise unless ``weight`` ([N, K], any dtype) obeys the pattern.

        Raises:
            PatternError: names the first offending row and block.
        """
        if weight.dim() != 2:
            raise PatternError(f"a pattern applies to a weight [N, K], got {weight.dim()} dimensions")
        found = self.violation(weight != 0)
        if found:
            raise PatternError(f"the weight does not obey {self}: {found}")

    @abstractmethod
    def __str__(self) -> str: ...


def blocks_along(x: Tensor, size: int, dim: int) -> Tensor:
    """Cut ``dim`` of a matrix into blocks of ``size``, the last one padded with zeros.

    Args:
        x: [N, K].
        size: the block's length.
        dim: 0 or 1.
    Returns:
        [N, ceil(K / size), size] for ``dim`` 1, [ceil(N / size), size, K] for ``dim`` 0.
    """
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, (0, missing, 0, 0) if dim == 1 else (0, 0, 0, missing))
    return x.unflatten(dim, (-1, size))


def top_of_rows(scores: Tensor, keep: int) -> Tensor:
    """Mark the ``keep`` highest of the last dimension; ties go to the lower index.

    Args:
        scores: [..., n] float.
    Returns:
        [..., n] bool.
    """
    if keep >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :keep], True)


def top_of_all(scores: Tensor, keep: int) -> Tensor:
    """Mark exactly ``keep`` highest of a whole tensor; ties go to the lower row, then the lower column."""
    flat = scores.reshape(-1)
    if keep >= flat.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    if keep <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = flat.kthvalue(flat.numel() - keep + 1).values
    above = flat > threshold
    tied = flat == threshold
    room = keep - above.sum()
    return (above | (tied & (tied.cumsum(0) <= room))).view_as(scores)

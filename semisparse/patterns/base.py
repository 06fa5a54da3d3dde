"""The base class of sparsity patterns: which weights of ``w[N, K]`` may be non-zero."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import PatternError


class Pattern(ABC):
    """Which weights may be non-zero. ``str(pattern)`` is the written form; parsing it gives an equal pattern."""

    forms: ClassVar[str]
    """The family's written forms, for error messages and help."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Pattern | None:
        """Parse the family's written form; return None if ``text`` belongs to another family.

        Raises:
            PatternError: ``text`` belongs to this family, but its numbers are out of range.
        """

    @property
    @abstractmethod
    def density(self) -> float:
        """Nominal fraction of weights kept, 0 to 1."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Columns whose mask is chosen together. A mask may be chosen in parts that start at multiples of ``step``."""

    @abstractmethod
    def kept(self, shape: tuple[int, int]) -> int:
        """Return how many weights `mask` keeps for ``shape`` [N, K]; a short group counts as a full one."""

    @abstractmethod
    def levels(self, shape: tuple[int, int]) -> int:
        """Return how many steps of `shifted` lie between keeping nothing and keeping everything, rounded down."""

    @abstractmethod
    def shifted(self, steps: int, shape: tuple[int, int]) -> Pattern | None:
        """Return the pattern of the same family that is denser by some steps.

        Args:
            steps: in the family's smallest steps of density; negative for sparser.
            shape: [N, K] of the weight.
        Returns:
            The pattern; None if it would keep nothing, or more than everything.
        """

    @abstractmethod
    def mask(self, scores: Tensor) -> Tensor:
        """Choose the weights to keep.

        Args:
            scores: saliency, [N, K] float; the highest are kept. Of equal scores the lower column is kept.
        Returns:
            [N, K] bool, True where the weight is kept.
        """

    @abstractmethod
    def violation(self, nonzero: Tensor) -> str | None:
        """Describe the first place where ``nonzero`` ([N, K] bool) breaks the pattern; return None if there is none."""

    def unrestricted(self) -> Pattern | None:
        """Return the pattern of the same family that every weight obeys; None if the family has none."""
        return None

    def patterns_of_slice(self) -> tuple[Pattern, ...]:
        """Return the patterns that a slice of a weight may be declared with, the strictest first.

        The first is this pattern, which a slice may break; every slice obeys the others.
        """
        from semisparse.patterns.unstructured import Unstructured  # not at the top: that module imports this one

        loosest = self.unrestricted()
        return (self, Unstructured(0), *([] if loosest is None else [loosest]))

    def check(self, weight: Tensor) -> None:
        """Raise unless ``weight`` ([N, K], any dtype) obeys the pattern.

        Raises:
            PatternError: names the first row and block that break it.
        """
        if weight.dim() != 2:
            raise PatternError(f"a pattern applies to a weight [N, K], got {weight.dim()} dimensions")
        violation = self.violation(weight != 0)
        if violation:
            raise PatternError(f"the weight does not obey {self}: {violation}")

    @abstractmethod
    def __str__(self) -> str: ...


def blocks_along(x: Tensor, size: int, dim: int) -> Tensor:
    """Split one dimension of a matrix into blocks; the last one is padded with zeros.

    Args:
        x: [N, K].
        size: elements per block.
        dim: 0 or 1.
    Returns:
        [N, ceil(K / size), size] for ``dim`` 1, [ceil(N / size), size, K] for ``dim`` 0.
    """
    missing = -x.shape[dim] % size
    if missing:
        x = F.pad(x, (0, missing, 0, 0) if dim == 1 else (0, 0, 0, missing))
    return x.unflatten(dim, (-1, size))


def top_per_row(scores: Tensor, keep: int) -> Tensor:
    """Mark the ``keep`` highest scores along the last dimension; of equal scores the lower index.

    Args:
        scores: [..., n] float.
    Returns:
        [..., n] bool.
    """
    if keep >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :keep], True)


def top_overall(scores: Tensor, keep: int) -> Tensor:
    """Mark exactly ``keep`` highest scores of a tensor; of equal scores the lower row, then the lower column."""
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

"""Rows of a linear layer's weight that a process prunes, in pieces whose rows do not depend on the processes.

Given the inverse factor, SparseGPT prunes each row by itself, so that several processes can share a weight's rows. But
a matmul of other rows may add in another order. So all matmuls have the rows of one piece, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

PIECES = 4
"""Pieces of a weight whose rows are shared. A quarter of llama2-7b's down projection, 1,024 rows, fills an H200."""

ALIGNMENT = 32
"""Rows of a piece are a multiple of this."""


class Rows:
    """The rows that this process prunes: a whole weight, or some pieces of it.

    Args:
        lengths: rows of each of this process's pieces; None for a whole weight, of any number of rows.
        all_of: returns the values of all pieces, in order, given those of this process's.
    """

    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        all_of: Callable[[list[Tensor]], list[Tensor]] = lambda values: values,
    ) -> None:
        self.lengths, self._all_of = lengths, all_of

    def joined(self, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return ``work(*tensors)`` of [rows, K] tensors, a piece at a time; of no rows, the first tensor."""
        if self.lengths is None:
            return work(*tensors)
        pieces = [work(*parts) for parts in self._pieces(tensors)]
        return torch.cat(pieces) if pieces else tensors[0]

    def total(self, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return the sum of ``work(*tensors)`` over the pieces of all processes."""
        if self.lengths is None:
            return work(*tensors)
        return reduce(torch.add, self._all_of([work(*parts) for parts in self._pieces(tensors)]))

    def _pieces(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(tensor.split(list(self.lengths or ())) for tensor in tensors), strict=True))


WHOLE = Rows()
"""All rows of a weight, in one piece."""


def piece_lengths(rows: int) -> list[int]:
    """Return the rows of each piece of a weight: `PIECES` or fewer."""
    length = -(-rows // PIECES // ALIGNMENT) * ALIGNMENT
    return [min(length, rows - start) for start in range(0, rows, length)]

"""Quantise a pruned weight, in one of two ways.

Where whole groups are pruned, `ColumnQuantiser` quantises inside the SparseGPT loop (GQSA, section 3.2). Where single
weights are, `round_by_descent` rounds after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from semisparse.patterns import Group, Pattern
from semisparse.quant.group import SYMMETRIC_COLUMNS, GroupScales, scales_of

SWEEPS = 2
"""Passes of `round_by_descent` over the columns."""

BLOCK_COLUMNS = 128
"""Columns whose effect on the columns after them is applied in one matmul."""


def scales_for(weight: Tensor, pattern: Pattern, bits: int, dtype: torch.dtype) -> GroupScales:
    """Compute scales for a pruned weight [N, K]: per group of a `Group` pattern, else symmetric ones per 64 columns."""
    if isinstance(pattern, Group):
        return scales_of(weight, bits, pattern.size, dtype)
    return scales_of(weight, bits, SYMMETRIC_COLUMNS, dtype, symmetric=True)


def round_by_descent(
    weight: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor, scales: GroupScales, columns: Tensor, units: Tensor
) -> Tensor:
    """Round kept weights to codes by cyclic coordinate descent on ``(w - goal) H (w - goal)^T``.

    First every weight is rounded to nearest. Then each weight in turn becomes the code nearest to its optimum, given
    all others of its row. SparseGPT's compensation is not used here: it also changes weights that are pruned and must
    stay zero, so at 70 % zeros its error is above that of rounding to nearest.

    The columns of all arguments but ``scales`` are permuted alike.

    Args:
        weight: [N, K] float32, zero where not kept.
        kept: [N, K] bool, the mask.
        hessian: [K, K] float32, positive definite.
        goal: [N, K] float32, the weight that minimises the layer's output error if nothing is pruned or rounded.
        scales: of groups of columns in the original order.
        columns: [K] int64, the original index of each column.
        units: [K] float32, by which each column was multiplied; columns are divided by it before they are quantised.
    Returns:
        [N, K] float32, dequantised.
    """
    scales = replace(scales.select_groups(columns // scales.size), size=1)

    def rounded_column(column: Tensor, i: int) -> Tensor:
        own = replace(scales, scale=scales.scale[:, i : i + 1], zero=scales.zero[:, i : i + 1])
        return own.rounded((column / units[i])[:, None])[:, 0].float() * units[i] * kept[:, i]

    rounded = scales.rounded(weight / units).float() * units
    for _ in range(SWEEPS):
        gradient = (rounded - goal) @ hessian
        for start in range(0, len(columns), BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, len(columns))
            before = rounded[:, start:stop].clone()
            for i in range(start, stop):
                column = rounded_column(rounded[:, i] - gradient[:, i] / hessian[i, i], i)
                gradient[:, i + 1 : stop] += torch.outer(column - rounded[:, i], hessian[i, i + 1 : stop])
                rounded[:, i] = column
            gradient[:, stop:] += (rounded[:, start:stop] - before) @ hessian[start:stop, stop:]
    return rounded


class ColumnQuantiser:
    """Quantises one column at a time. A group's scales are computed at its first column, from its kept weights.

    Args:
        bits: per code.
        size: columns per group; the first group starts at column 0.
        units: [K] float32, by which each column of the weight was multiplied; columns are divided by it before they are
            quantised.
        dtype: of the scales.
    """

    def __init__(self, bits: int, size: int, units: Tensor, dtype: torch.dtype) -> None:
        self._bits, self._size, self._units, self._dtype = bits, size, units, dtype
        self._groups: list[GroupScales] = []

    @property
    def scales(self) -> GroupScales:
        """The scales of all groups so far, in column order."""
        scale = torch.cat([group.scale for group in self._groups], dim=1)
        zero = torch.cat([group.zero for group in self._groups], dim=1)
        return replace(self._groups[0], scale=scale, zero=zero)

    def fake_quantise(self, weight: Tensor, kept: Tensor, column: int) -> Tensor:
        """Quantise and dequantise one column. Columns must be passed in order.

        Args:
            weight: [N, K] float32; its columns from ``column`` on are compensated for the errors of all columns before.
            kept: [N, K] bool, the mask; final up to the end of the column's group.
            column: its index.
        Returns:
            [N] float32.
        """
        if column % self._size == 0:
            group = slice(column, column + self._size)
            unscaled = (weight[:, group] / self._units[group]).masked_fill(~kept[:, group], 0)
            self._groups.append(scales_of(unscaled, self._bits, self._size, self._dtype))
        scales = replace(self._groups[-1], size=1)
        values = scales.values(scales.codes(weight[:, column, None] / self._units[column]))
        return values.flatten().float() * self._units[column]

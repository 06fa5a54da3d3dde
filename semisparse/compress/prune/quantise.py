"""Quantise a pruned weight: whole groups inside the SparseGPT loop (GQSA, section 3.2), single weights after it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from semisparse.patterns import Group, Pattern
from semisparse.quant.fit import fit_scales
from semisparse.quant.group import SYMMETRIC_COLUMNS, GroupScales, scales_of

SWEEPS = 2
"""Passes of `round_by_descent` over the columns."""

BLOCK_COLUMNS = 128
"""Columns whose effect on the columns after them is applied in one matmul."""


def scales_for(
    weight: Tensor, pattern: Pattern, bits: int, dtype: torch.dtype, importance: Tensor | None = None
) -> GroupScales:
    """Compute scales for a pruned weight [N, K]: per group of a `Group` pattern, else symmetric ones per 64 columns.

    With the ``importance`` of the columns, [K] float32, the scales minimise the error weighted by it (`fit_scales`).
    """
    size, symmetric = (pattern.size, False) if isinstance(pattern, Group) else (SYMMETRIC_COLUMNS, True)
    if importance is None:
        return scales_of(weight, bits, size, dtype, symmetric=symmetric)
    return fit_scales(weight, importance, bits, size, dtype, symmetric)


def round_by_descent(
    weight: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor, scales: GroupScales, columns: Tensor, units: Tensor
) -> Tensor:
    """Round kept weights to codes by cyclic coordinate descent on ``(w - goal) H (w - goal)^T``.

    First every weight is rounded to nearest. Then each weight in turn becomes the code nearest to its optimum, given
    all others of its row. SparseGPT's compensation is not used here: it also changes weights that are pruned and must
    stay zero, so at 70 % zeros it loses more than rounding to nearest.

    Args:
        weight: [N, K] float32, zero where not kept.
        kept: [N, K] bool, the mask.
        hessian: [K, K] float32, positive definite.
        goal: [N, K] float32, the minimiser without a mask.
        scales: of groups of the weight's own columns.
        columns: [K] int64, the weight's own column of each column here.
        units: [K] float32, the factor that each column was multiplied by; codes are of the unscaled weight.
    Returns:
        [N, K] float32, dequantised.
    """
    scales = replace(scales.select_groups(columns // scales.size), size=1)

    def rounded_column(column: Tensor, i: int) -> Tensor:
        own = replace(scales, scale=scales.scale[:, i : i + 1], zero=scales.zero[:, i : i + 1])
        return own.rounded((column / units[i])[:, None])[:, 0].float() * units[i] * kept[:, i]

    rounded = scales.rounded(weight / units).float() * units
    if has_rounding_kernel(weight):
        return _by_kernel(rounded, kept, hessian.contiguous(), goal, scales, units)
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


def _by_kernel(
    rounded: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor, scales: GroupScales, units: Tensor
) -> Tensor:
    """Descend as `round_by_descent` does, a block of columns per launch."""
    from semisparse.compress.prune.rounding_triton import descend_block

    rounded, mask = rounded.contiguous(), kept.to(torch.int8).contiguous()
    per_column, units = scales.scale.float().contiguous(), units.contiguous()
    for _ in range(SWEEPS):
        gradient = ((rounded - goal) @ hessian).contiguous()
        for start in range(0, rounded.shape[1], BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, rounded.shape[1])
            before = rounded[:, start:stop].clone()
            bits, dtype = scales.bits, scales.scale.dtype
            descend_block(rounded, gradient, mask, hessian, per_column, units, start, stop, bits, dtype)
            gradient[:, stop:] += (rounded[:, start:stop] - before) @ hessian[start:stop, stop:]
    return rounded


def has_rounding_kernel(weight: Tensor) -> bool:
    """Return whether the Triton kernels of rounding_triton.py round this weight."""
    return weight.is_cuda and find_spec("triton") is not None


class ColumnQuantiser:
    """Quantises one column at a time. A group's scales are computed at its first column, from its kept weights.

    Args:
        bits: per code.
        size: columns per group; the first group starts at column 0.
        units: [K] float32, the factor that each column of the weight was multiplied by; codes are of the unscaled
            weight.
        dtype: of the scales.
        importance: [K] float32, how much the squared error of each column counts when its scales are fitted; None for
            scales that span each group.
    """

    def __init__(
        self, bits: int, size: int, units: Tensor, dtype: torch.dtype, importance: Tensor | None = None
    ) -> None:
        self._bits, self._size, self._units, self._dtype = bits, size, units, dtype
        self._importance = importance
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
            weight: [N, K] float32; the columns before ``column`` are final.
            kept: [N, K] bool, the mask; final up to the end of the column's group.
            column: its index.
        Returns:
            [N] float32.
        """
        if column % self._size == 0:
            self._next_scales(weight, kept, column)
        scales = replace(self._groups[-1], size=1)
        values = scales.values(scales.codes(weight[:, column, None] / self._units[column]))
        return values.flatten().float() * self._units[column]

    def round_all(self, weight: Tensor, kept: Tensor, upper: Tensor) -> Tensor:
        """Round all columns in order, each group with a kernel; the columns after a group compensate its loss.

        Args:
            weight: [N, K] float32, on a GPU.
            kept: [N, K] bool, the mask.
            upper: [K, K] float32, as in `sparsegpt.InverseFactor`.
        """
        from semisparse.compress.prune.rounding_triton import round_group

        weight, upper = weight.clone(memory_format=torch.contiguous_format), upper.contiguous()
        mask, units = kept.to(torch.int8).contiguous(), self._units.contiguous()
        for start in range(0, weight.shape[1], self._size):
            scales = self._next_scales(weight, kept, start)
            zero = (scales.zero[:, 0].float() * 2.0 ** (self._bits - 8)).contiguous()
            size = min(self._size, weight.shape[1] - start)
            round_group(weight, mask, upper, scales.scale[:, 0].contiguous(), zero, units, start, size, self._bits)
        return weight

    def _next_scales(self, weight: Tensor, kept: Tensor, column: int) -> GroupScales:
        """Compute the scales of the group that begins at a column."""
        group = slice(column, column + self._size)
        unscaled = (weight[:, group] / self._units[group]).masked_fill(~kept[:, group], 0)
        if self._importance is None:
            scales = scales_of(unscaled, self._bits, self._size, self._dtype)
        else:
            scales = fit_scales(unscaled, self._importance[group], self._bits, self._size, self._dtype)
        self._groups.append(scales)
        return scales

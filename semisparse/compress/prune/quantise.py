"""Quantise a pruned weight, in one of two ways.

Where whole groups are pruned, `ColumnQuantiser` quantises inside the SparseGPT loop (GQSA, section 3.2). Where single
weights are, `round_by_descent` rounds after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from semisparse.patterns import Group, Pattern
from semisparse.quant.fit import REFITS, fit_scales, shares_of
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
    weight: Tensor,
    kept: Tensor,
    hessian: Tensor,
    goal: Tensor,
    scales: Sequence[GroupScales],
    columns: Tensor,
    units: Tensor,
) -> list[Tensor]:
    """Round kept weights to codes by cyclic coordinate descent on ``(w - goal) H (w - goal)^T``.

    First every weight is rounded to nearest. Then each weight in turn becomes the code nearest to its optimum, given
    all others of its row. SparseGPT's compensation is not used here. It also changes weights that are pruned and must
    stay zero, so at 70 % zeros its error is above that of rounding to nearest.

    The columns of all arguments but ``scales`` are permuted alike.

    Args:
        weight: [N, K] float32, zero where not kept.
        kept: [N, K] bool, the mask.
        hessian: [K, K] float32, positive definite.
        goal: [N, K] float32, the weight that minimises the layer's output error if nothing is pruned or rounded.
        scales: symmetric ones, of groups of columns in the original order; the weight is rounded once for each. On a
            CPU the roundings run together, because there the calls of torch, not the arithmetic, take the time.
        columns: [K] int64, the original index of each column.
        units: [K] float32, by which each column was multiplied; columns are divided by it before they are quantised.
    Returns:
        For each of the scales the dequantised weight, [N, K] float32.
    """
    permuted = [replace(each.select_groups(columns // each.size), size=1) for each in scales]
    nearest = [each.rounded(weight / units).float() * units for each in permuted]
    if has_rounding_kernel(weight):
        pairs = zip(nearest, permuted, strict=True)
        return [_by_kernel(rounded, kept, hessian.contiguous(), goal, each, units) for rounded, each in pairs]
    rounded, mask, targets = torch.cat(nearest), kept.repeat(len(scales), 1), goal.repeat(len(scales), 1)
    scale = torch.cat([each.scale.float() for each in permuted])
    middle = torch.cat([torch.full((len(weight),), 2.0 ** (each.bits - 1), device=weight.device) for each in scales])
    last, dtype = 2 * middle - 1, scales[0].scale.dtype
    for _ in range(SWEEPS):
        gradient = (rounded - targets) @ hessian
        for start in range(0, len(columns), BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, len(columns))
            before = rounded[:, start:stop].clone()
            for i in range(start, stop):
                best = (rounded[:, i] - gradient[:, i] / hessian[i, i]) / units[i]
                codes = (best / scale[:, i] + middle).round().clamp_min(0).minimum(last)
                column = ((codes - middle) * scale[:, i]).to(dtype).float() * units[i] * mask[:, i]
                gradient[:, i + 1 : stop] += torch.outer(column - rounded[:, i], hessian[i, i + 1 : stop])
                rounded[:, i] = column
            gradient[:, stop:] += (rounded[:, start:stop] - before) @ hessian[start:stop, stop:]
    return list(rounded.chunk(len(scales)))


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
        bits: per code. If there are several numbers, the rows of the weight are that many blocks of equal size, one for
            each number.
        size: columns per group; the first group starts at column 0.
        units: [K] float32, by which each column of the weight was multiplied; columns are divided by it before they are
            quantised.
        dtype: of the scales.
        importance: [K] float32, how much the squared error of each column counts when its scales are fitted; None for
            scales that span each group.
    """

    def __init__(
        self, bits: Sequence[int], size: int, units: Tensor, dtype: torch.dtype, importance: Tensor | None = None
    ) -> None:
        self._bits, self._size, self._units, self._dtype = tuple(bits), size, units, dtype
        self._importance = importance
        self._groups: list[list[GroupScales]] = []
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def scales(self) -> list[GroupScales]:
        """The scales of all groups so far, in column order, of each block of rows."""
        blocks = zip(*self._groups, strict=True)
        return [
            replace(
                block[0],
                scale=torch.cat([group.scale for group in block], dim=1),
                zero=torch.cat([group.zero for group in block], dim=1),
            )
            for block in blocks
        ]

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
            self._rows = self._next_scales(weight, kept, column)
        assert self._rows is not None
        scale, zero, last = self._rows
        unit = self._units[column]
        codes = (weight[:, column] / unit / scale + zero).round().clamp_min(0).minimum(last)
        return ((codes - zero) * scale).to(self._dtype).float() * unit

    def round_all(self, weight: Tensor, kept: Tensor, upper: Tensor) -> Tensor:
        """Round all columns in order, each group with a kernel; the columns after a group compensate its loss.

        Args:
            weight: [N, K] float32, on a GPU.
            kept: [N, K] bool, the mask.
            upper: [K, K] float32, as in `factor.InverseFactor`.
        """
        from semisparse.compress.prune.rounding_triton import round_group

        weight, upper = weight.clone(memory_format=torch.contiguous_format), upper.contiguous()
        mask, units = kept.to(torch.int8).contiguous(), self._units.contiguous()
        codes = torch.tensor([2.0**bits - 1 for bits in self._bits], device=weight.device)
        lasts = codes.repeat_interleave(len(weight) // len(self._bits))
        importance = None if self._importance is None else self._importance.contiguous()
        for start in range(0, weight.shape[1], self._size):
            if importance is None:
                scale, zero, last = self._next_scales(weight, kept, start)
            else:
                scale, zero, last = self._fitted_by_kernel(weight, mask, start, importance, lasts)
            size = min(self._size, weight.shape[1] - start)
            round_group(weight, mask, upper, scale, zero, last, units, start, size, self._dtype)
        return weight

    def _next_scales(self, weight: Tensor, kept: Tensor, column: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the scales of the group that begins at a column; return scale, zero point and last code, [N] each."""
        group = slice(column, column + self._size)
        unscaled = (weight[:, group] / self._units[group]).masked_fill(~kept[:, group], 0)
        scales = []
        for bits, block in zip(self._bits, unscaled.chunk(len(self._bits)), strict=True):
            if self._importance is None:
                scales.append(scales_of(block, bits, self._size, self._dtype))
            else:
                scales.append(fit_scales(block, self._importance[group], bits, self._size, self._dtype))
        self._groups.append(scales)
        scale = torch.cat([each.scale[:, 0].float() for each in scales])
        zero = torch.cat([each.zero[:, 0].float() * 2.0 ** (each.bits - 8) for each in scales])
        last = torch.cat([torch.full_like(each.zero[:, 0], 2**each.bits - 1, dtype=torch.float32) for each in scales])
        return scale, zero, last

    def _fitted_by_kernel(
        self, weight: Tensor, mask: Tensor, column: int, importance: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do as `_next_scales`; the mask is [N, K] int8, ``last`` is the last codes."""
        from semisparse.quant.fit_triton import fit

        group = slice(column, column + self._size)
        shares = [shares_of(bits) for bits in self._bits]
        rest, units = (self._bits, shares, self._size, self._dtype, REFITS), self._units[group]
        scale, zero = fit(weight[:, group], importance[group], *rest, kept=mask[:, group], units=units)
        stored, count = scale.to(self._dtype), len(self._bits)
        pairs = zip(self._bits, stored.chunk(count), zero.chunk(count), strict=True)
        self._groups.append([GroupScales(bits, self._size, own, at) for bits, own, at in pairs])
        return scale[:, 0], zero[:, 0] * ((last + 1) / 256), last

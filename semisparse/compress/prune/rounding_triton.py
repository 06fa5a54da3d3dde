"""Rounding one column after another, as Triton kernels: the columns of a group, and a block of coordinate descent.

In torch a column takes some 15 launches, and the linear layers of a llama2-7b decoder layer have 35,584 columns. A
search rounds each of them in some 20 ways.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS = 4, 1
"""Rows and warps per program, as in sweep_triton.py."""


@triton.jit
def _code(exact, last):
    """Round half to even, as torch does, and clamp to a code: adding 1.5 * 2^23 leaves no fraction."""
    shifted = exact + 12582912.0
    return tl.minimum(tl.maximum(shifted - 12582912.0, 0.0), last)


@triton.jit
def semisparse_round_group(
    weight,
    kept,
    losses,
    upper,
    scale,
    zero,
    last,
    units,
    rows,
    columns,
    start,
    size,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round columns ``start`` to ``start + size`` of weight [rows, columns] in place. Grid: (ceil(rows / ROWS),).

    Writes each column's loss to losses [rows, COLUMNS]. ``scale``, ``zero`` and ``last`` are [rows] float32,
    ``kept`` is [rows, columns] int8, ``units`` [columns] and ``upper`` [columns, columns] float32. Values are of
    ``DTYPE``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_group = column < size
    inside = (row < rows)[:, None] & in_group[None, :]
    at = row[:, None] * columns + start + column[None, :]
    values = tl.load(weight + at, mask=inside, other=0.0)
    mask = tl.load(kept + at, mask=inside, other=0).to(tl.int32)
    own_scale = tl.load(scale + row, mask=row < rows, other=1.0)
    own_zero = tl.load(zero + row, mask=row < rows, other=0.0)
    own_last = tl.load(last + row, mask=row < rows, other=0.0)
    factor = tl.load(units + start + column, mask=in_group, other=1.0)
    first_of_group = upper + start.to(tl.int64) * (columns + 1)
    lost = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, size):
        here = (column == i)[None, :]
        before = tl.sum(tl.where(here, values, 0.0), axis=1)
        keeps = tl.sum(tl.where(here, mask, 0), axis=1)
        unit = tl.broadcast_to(tl.sum(tl.where(column == i, factor, 0.0), axis=0), (ROWS,))
        code = _code(tl.div_rn(tl.div_rn(before, unit), own_scale) + own_zero, own_last)
        rounded = ((code - own_zero) * own_scale).to(DTYPE).to(tl.float32) * unit
        final = tl.where(keeps != 0, rounded, 0.0)
        factors = tl.load(first_of_group + i * columns + column, mask=in_group, other=0.0)
        own = tl.sum(tl.where(column == i, factors, 0.0), axis=0)
        loss = tl.div_rn(before - final, tl.broadcast_to(own, (ROWS,)))
        values = tl.where((column > i)[None, :], values - loss[:, None] * factors[None, :], values)
        values = tl.where(here, final[:, None], values)
        lost = tl.where(here, loss[:, None], lost)
    tl.store(weight + at, values, mask=inside)
    tl.store(losses + row[:, None] * COLUMNS + column[None, :], lost, mask=(row < rows)[:, None])


@triton.jit
def semisparse_descend_block(
    rounded,
    gradient,
    kept,
    hessian,
    scale,
    units,
    rows,
    columns,
    start,
    stop,
    MIDDLE: tl.constexpr,
    LAST: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move columns ``start`` to ``stop`` of rounded [rows, columns] to their best codes. Grid: (ceil(rows / ROWS),).

    Changes ``rounded`` and the block's columns of ``gradient`` [rows, columns]. ``scale`` is [rows, columns] float32.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_block = start + column < stop
    inside = (row < rows)[:, None] & in_block[None, :]
    at = row[:, None] * columns + start + column[None, :]
    values = tl.load(rounded + at, mask=inside, other=0.0)
    slopes = tl.load(gradient + at, mask=inside, other=0.0)
    mask = tl.load(kept + at, mask=inside, other=0).to(tl.int32)
    scales = tl.load(scale + at, mask=inside, other=1.0)
    factor = tl.load(units + start + column, mask=in_block, other=1.0)
    first_of_block = hessian + start.to(tl.int64) * (columns + 1)
    for i in range(0, stop - start):
        here = (column == i)[None, :]
        before = tl.sum(tl.where(here, values, 0.0), axis=1)
        slope = tl.sum(tl.where(here, slopes, 0.0), axis=1)
        own_scale = tl.sum(tl.where(here, scales, 0.0), axis=1)
        keeps = tl.sum(tl.where(here, mask, 0), axis=1)
        unit = tl.broadcast_to(tl.sum(tl.where(column == i, factor, 0.0), axis=0), (ROWS,))
        factors = tl.load(first_of_block + i * columns + column, mask=in_block, other=0.0)
        own = tl.broadcast_to(tl.sum(tl.where(column == i, factors, 0.0), axis=0), (ROWS,))
        best = tl.div_rn(before - tl.div_rn(slope, own), unit)
        code = _code(tl.div_rn(best, own_scale) + MIDDLE, LAST)
        after = tl.where(keeps != 0, ((code - MIDDLE) * own_scale).to(DTYPE).to(tl.float32) * unit, 0.0)
        slopes = tl.where((column > i)[None, :], slopes + (after - before)[:, None] * factors[None, :], slopes)
        values = tl.where(here, after[:, None], values)
    tl.store(rounded + at, values, mask=inside)
    tl.store(gradient + at, slopes, mask=inside)


_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def round_group(
    weight: Tensor,
    kept: Tensor,
    upper: Tensor,
    scale: Tensor,
    zero: Tensor,
    last: Tensor,
    units: Tensor,
    start: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    """Round the columns of a group in place, and let all columns after them compensate.

    Args:
        weight: [N, K] float32, contiguous.
        kept: [N, K] int8, the mask.
        upper: [K, K] float32, contiguous, as in `factor.InverseFactor`.
        scale: [N] float32.
        zero: [N] float32, zero points in codes.
        last: [N] float32, the largest code.
        units: [K] float32, by which each column was multiplied; columns are divided by it before they are quantised.
        start: the group's first column.
        size: its columns.
        dtype: that dequantised weights have.
    """
    rows, columns = weight.shape
    width = triton.next_power_of_2(size)
    losses = torch.empty((rows, width), dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(weight):  # where Triton launches
        semisparse_round_group[(triton.cdiv(rows, ROWS),)](
            weight,
            kept,
            losses,
            upper,
            scale,
            zero,
            last,
            units,
            rows,
            columns,
            start,
            size,
            DTYPE=_DTYPES[dtype],
            ROWS=ROWS,
            COLUMNS=width,
            num_warps=WARPS,
            enable_fp_fusion=False,  # a product is rounded before it is subtracted, as in torch
        )
    stop = start + size
    weight[:, stop:] -= losses[:, :size] @ upper[start:stop, stop:]


def descend_block(
    rounded: Tensor,
    gradient: Tensor,
    kept: Tensor,
    hessian: Tensor,
    scale: Tensor,
    units: Tensor,
    start: int,
    stop: int,
    bits: int,
    dtype: torch.dtype,
) -> None:
    """Move the columns of a block to their best codes in place, one after another, and update the block's gradient.

    Args:
        rounded: [N, K] float32, contiguous; the present values, zero where not kept.
        gradient: [N, K] float32, contiguous, of half the loss.
        kept: [N, K] int8, the mask.
        hessian: [K, K] float32, contiguous.
        scale: [N, K] float32, of each column; the codes are symmetric.
        units: [K] float32, as in `round_group`.
        start: the first column of the block.
        stop: the end of the block.
        bits: per code.
        dtype: that dequantised weights have.
    """
    rows, columns = rounded.shape
    with torch.cuda.device_of(rounded):  # where Triton launches
        semisparse_descend_block[(triton.cdiv(rows, ROWS),)](
            rounded,
            gradient,
            kept,
            hessian,
            scale,
            units,
            rows,
            columns,
            start,
            stop,
            MIDDLE=float(2 ** (bits - 1)),
            LAST=float(2**bits - 1),
            DTYPE=_DTYPES[dtype],
            ROWS=ROWS,
            COLUMNS=triton.next_power_of_2(stop - start),
            num_warps=WARPS,
            enable_fp_fusion=False,
        )

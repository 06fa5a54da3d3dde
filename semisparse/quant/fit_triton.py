"""`fit.fit_scales` as one Triton kernel. In torch it takes some 80 launches, for each group of a bank's columns.

Every operation rounds as torch's does, but sums over a group are taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisparse.quant.group import MIDDLE

ROWS, WARPS = 4, 1
"""Rows and warps per program."""

MOST = tl.constexpr(8)
"""Shares that a block of rows has at most."""

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""The Triton dtypes that scales may have."""


@triton.jit
def _nearest(x):
    """Round to a whole number, half to even, as torch does: adding 1.5 * 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _clamped(x, highest):
    return tl.minimum(tl.maximum(x, 0.0), highest)


@triton.jit
def _divided(x, by):
    """Divide and round to nearest; ``by`` is a number, or of x's shape."""
    return tl.div_rn(x, tl.zeros_like(x) + by)


@triton.jit
def _wide(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.broadcast_to(x[:, None], (ROWS, COLUMNS))


@triton.jit
def _codes(values, scale, zero, unit, last, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return codes less the zero point in codes; ``zero`` is stored in ``unit`` codes."""
    exact = tl.div_rn(values, _wide(scale, ROWS, COLUMNS)) + (zero * unit)[:, None]
    return _clamped(_nearest(exact), last) - (zero * unit)[:, None]


@triton.jit
def _error(values, factor, scale, zero, unit, last, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    change = _codes(values, scale, zero, unit, last, ROWS, COLUMNS) * scale[:, None] - values
    return tl.sum(change * change * factor, axis=1)


@triton.jit
def _within_range(scale, zero, unit, last, largest, epsilon, DTYPE: tl.constexpr):
    """Return what `GroupScales.within_range` does."""
    limit = _divided(tl.zeros_like(scale) + largest, tl.maximum(zero * unit, last - zero * unit))
    smaller = _rounded(limit * (1 - epsilon), DTYPE)
    return tl.where(tl.abs(scale) > limit, tl.where(scale < 0, -smaller, smaller), scale)


@triton.jit
def _spanning(
    low, high, unit, last, largest, epsilon, MIDDLE: tl.constexpr, SYMMETRIC: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the scale and stored zero point whose codes span the values from ``low`` to ``high``."""
    if SYMMETRIC:
        scale = _rounded(_divided(tl.where(high > -low, high, low), -(last + 1) * 0.5), DTYPE)
        scale = tl.where(scale == 0, 1.0, scale)
        zero = tl.zeros_like(low) + MIDDLE
    else:
        scale, zero = _between(low, high, unit, last, DTYPE)
        scale = _within_range(scale, zero, unit, last, largest, epsilon, DTYPE)
    return scale, zero


@triton.jit
def _between(low, high, unit, last, DTYPE: tl.constexpr):
    """Return the scale and stored zero point whose codes span a range that is not symmetric."""
    scale = _rounded(_divided(high - low, last), DTYPE)
    scale = tl.where(scale == 0, 1.0, scale)
    return scale, _clamped(_nearest(_divided(_divided(-low, scale), unit)), 255.0)


@triton.jit
def _refitted(
    values,
    factor,
    scale,
    zero,
    unit,
    last,
    SYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the scale and stored zero point that fit the codes best, by least squares; the present ones if none do."""
    code = _codes(values, scale, zero, unit, last, ROWS, COLUMNS)
    if SYMMETRIC:
        power = tl.sum(factor * (code * code), axis=1)
        tried = _rounded(_divided(tl.sum(factor * code * values, axis=1), power), DTYPE)
        usable = (power > 0) & (tried != 0) & (tl.abs(tried) < float("inf"))
        tried, tried_zero = tl.where(usable, tried, scale), zero
    else:
        code += (zero * unit)[:, None]
        total = tl.maximum(tl.sum(factor, axis=1), 1e-30)
        mean_code = _divided(tl.sum(factor * code, axis=1), total)
        mean_value = _divided(tl.sum(factor * values, axis=1), total)
        centred, wanted = code - mean_code[:, None], values - mean_value[:, None]
        power = tl.sum(factor * (centred * centred), axis=1)
        tried = _rounded(_divided(tl.sum(factor * centred * wanted, axis=1), power), DTYPE)
        usable = (power > 0) & (tried > 0) & (tried < float("inf"))
        tried = tl.where(usable, tried, scale)
        fitted = _divided(mean_code - _divided(mean_value, tried), unit)
        tried_zero = tl.where(usable, _clamped(_nearest(fitted), 255.0), zero)
    return tried, tried_zero


@triton.jit
def _better(scale, zero, least, tried, tried_zero, error):
    """Return the scale, zero point and error of the two candidates that has the lower error, row by row."""
    lower = error < least
    return tl.where(lower, tried, scale), tl.where(lower, tried_zero, zero), tl.minimum(error, least)


@triton.jit
def semisparse_fit_scales(
    weight,
    kept,
    units,
    importance,
    shares,
    scales,
    zeros,
    rows,
    row_stride,
    columns,
    size,
    groups,
    lasts,
    counts,
    largest,
    epsilon,
    REFITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fit the scales and stored zero points of groups of ``size`` columns. Grid: (ceil(rows / ROWS), groups, blocks).

    ``weight`` is [blocks * rows, columns] float32. Each block of rows has its own last code (``lasts``, [blocks]
    float32) and its own number (``counts``, [blocks] int32) of ``shares``, [blocks, MOST]. With MASKED, columns are
    divided by ``units`` [columns], and what is not ``kept`` ([blocks * rows, columns] int8) counts as zero.
    ``importance`` is [columns]; ``scales`` and ``zeros`` are [blocks * rows, groups] float32, scales rounded to DTYPE.
    """
    block = tl.program_id(2)
    inner = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = block.to(tl.int64) * rows + inner
    column = tl.program_id(1) * size + tl.arange(0, COLUMNS)
    own = (tl.arange(0, COLUMNS) < size) & (column < columns)
    inside = (inner < rows)[:, None] & own[None, :]
    at = row[:, None] * row_stride + column[None, :]
    values = tl.load(weight + at, mask=inside, other=0.0)
    factor = tl.load(importance + column, mask=own, other=0.0)[None, :]
    if MASKED:
        unit_of = tl.load(units + column, mask=own, other=1.0)
        values = tl.div_rn(values, tl.broadcast_to(unit_of[None, :], (ROWS, COLUMNS)))
        values = tl.where(tl.load(kept + at, mask=inside, other=0) != 0, values, 0.0)
    factor = tl.broadcast_to(factor, (ROWS, COLUMNS))
    if SYMMETRIC:
        factor = tl.where(values != 0, factor, 0.0)
    last, number = tl.load(lasts + block), tl.load(counts + block)
    unit = (last + 1) * 0.00390625
    low, high = tl.minimum(tl.min(values, axis=1), 0.0), tl.maximum(tl.max(values, axis=1), 0.0)
    spanning, zero = _spanning(low, high, unit, last, largest, epsilon, MIDDLE, SYMMETRIC, DTYPE)
    scale, least = spanning, _error(values, factor, spanning, zero, unit, last, ROWS, COLUMNS)
    for i in range(0, number):
        first = tl.load(shares + block * MOST + i)
        for j in range(0, 2 if SYMMETRIC else number):
            if SYMMETRIC:  # both signs: the range of codes is not symmetric
                tried, tried_zero = _rounded(spanning * tl.where(j == 0, first, -first), DTYPE), zero
                tried = tl.where(tried == 0, spanning, tried)
            else:
                above = high * tl.load(shares + block * MOST + j)
                tried, tried_zero = _between(low * first, above, unit, last, DTYPE)
            error = _error(values, factor, tried, tried_zero, unit, last, ROWS, COLUMNS)
            scale, zero, least = _better(scale, zero, least, tried, tried_zero, error)
    for _ in range(0, REFITS):
        tried, tried_zero = _refitted(values, factor, scale, zero, unit, last, SYMMETRIC, DTYPE, ROWS, COLUMNS)
        error = _error(values, factor, tried, tried_zero, unit, last, ROWS, COLUMNS)
        scale, zero, least = _better(scale, zero, least, tried, tried_zero, error)
    scale = _within_range(scale, zero, unit, last, largest, epsilon, DTYPE)
    out = row * groups + tl.program_id(1)
    tl.store(scales + out, scale, mask=inner < rows)
    tl.store(zeros + out, zero, mask=inner < rows)


def fit(
    weight: Tensor,
    importance: Tensor,
    bits: Sequence[int],
    shares: Sequence[Sequence[float]],
    size: int,
    dtype: torch.dtype,
    refits: int,
    *,
    symmetric: bool = False,
    kept: Tensor | None = None,
    units: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fit scales and zero points, as `fit.fit_scales` does.

    Args:
        weight: [blocks * N, K] float32, columns next to each other.
        importance: [K] float32.
        bits: per code, of each block of N rows.
        shares: those that are tried, of each block.
        size: weights per group.
        dtype: of the scales.
        refits: as `fit.REFITS`.
        symmetric: whether the zero points stay in the middle.
        kept: [blocks * N, K] int8, with the strides of ``weight``; what is not kept counts as zero.
        units: [K] float32, by which columns are divided; needed with ``kept``.
    Returns:
        Scales, rounded to ``dtype``, and stored zero points, [blocks * N, groups] float32 each.
    """
    blocks, columns = len(bits), weight.shape[1]
    rows, groups = len(weight) // blocks, -(-columns // size)
    scales = torch.empty((len(weight), groups), dtype=torch.float32, device=weight.device)
    zeros = torch.empty_like(scales)
    lasts, counts, table = _tables(tuple(bits), tuple(map(tuple, shares)), weight.device)
    limits = torch.finfo(dtype)
    with torch.cuda.device_of(weight):  # where Triton launches
        semisparse_fit_scales[(triton.cdiv(rows, ROWS), groups, blocks)](
            weight,
            weight if kept is None else kept,
            importance if units is None else units,
            importance,
            table,
            scales,
            zeros,
            rows,
            weight.stride(0),
            columns,
            size,
            groups,
            lasts,
            counts,
            limits.max,
            limits.eps,
            REFITS=refits,
            MIDDLE=float(MIDDLE),
            SYMMETRIC=symmetric,
            MASKED=kept is not None,
            DTYPE=DTYPES[dtype],
            ROWS=ROWS,
            COLUMNS=triton.next_power_of_2(size),
            num_warps=WARPS,
            enable_fp_fusion=False,  # a product is rounded before it is added, as in torch
        )
    return scales, zeros


@lru_cache
def _tables(bits: tuple[int, ...], shares: tuple[tuple[float, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Return last codes, numbers of shares and shares. A copy to a GPU waits for it, so each is made once."""
    lasts = torch.tensor([2.0**each - 1 for each in bits], device=device)
    counts = torch.tensor([len(each) for each in shares], dtype=torch.int32, device=device)
    return lasts, counts, torch.tensor([[*each, *[1.0] * (MOST.value - len(each))] for each in shares], device=device)

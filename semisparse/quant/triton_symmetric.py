"""`quantise_rows` as one Triton kernel: a program for each row, which reads it twice, the second time from cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisparse.quant.symmetric import LARGEST

BLOCK = 4096
"""Columns that a program holds at once."""


@triton.jit
def row_scale(row, columns, largest, BLOCK: tl.constexpr):
    """Give the scale of the ``columns`` values at ``row``, their largest magnitude over ``largest``, and its inverse."""
    offsets = tl.arange(0, BLOCK)
    highest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        values = tl.load(row + first + offsets, mask=inside, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(values))
    amax = tl.max(highest)
    amax = tl.where(amax == 0, largest, amax)
    return tl.div_rn(amax, largest), tl.minimum(tl.div_rn(largest, amax), 3.4028234663852886e38)


@triton.jit
def round_to(values, inverse, largest, TO_INT8: tl.constexpr):
    """Scale and saturate; for int8 round too, as the cast that follows cuts off."""
    scaled = tl.minimum(tl.maximum(values * inverse, -largest), largest)
    if TO_INT8:
        # Adding and taking away 1.5 * 2^23 rounds half to even, as torch does; Triton has no rint of its own.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled


@triton.jit
def semisparse_quantise_rows(x, rounded, scales, columns, largest, BLOCK: tl.constexpr, TO_INT8: tl.constexpr):
    """Round one row."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    scale, inverse = row_scale(x + start, columns, largest, BLOCK)
    tl.store(scales + row, scale)
    offsets = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        values = tl.load(x + start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        scaled = round_to(values, inverse, largest, TO_INT8)
        tl.store(rounded + start + first + offsets, scaled.to(rounded.dtype.element_ty), mask=inside)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits at its own scale, with the same result as `symmetric.quantise_rows`.

    Args:
        x: [rows, columns] float, on a GPU.
        dtype: torch.int8 or torch.float8_e4m3fn.
    Returns:
        [rows, columns] of ``dtype``, and scales [rows] float32.
    """
    x = x.contiguous()
    rows, columns = x.shape
    rounded = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    semisparse_quantise_rows[(rows,)](
        x, rounded, scales, columns, LARGEST[dtype], BLOCK=block, TO_INT8=dtype == torch.int8
    )
    return rounded, scales

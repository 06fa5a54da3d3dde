"""`quantise_rows` as one Triton kernel: a program for each row, which reads it twice, the second time from cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisparse.quant.symmetric import LARGEST

BLOCK, WARPS = 4096, 8
"""Columns that a program holds at once, and its warps."""

EIGHT_BITS = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}
"""Triton's names."""


@triton.jit
def row_scale(row, columns, largest, BLOCK: tl.constexpr):
    """Give the scale of the ``columns`` values at ``row``, the largest magnitude over ``largest``, and its inverse.

    Magnitudes are compared by their bits, which order as they do, with NaN above all: `tl.max` would leave it out.
    """
    offsets = tl.arange(0, BLOCK)
    highest = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        values = tl.load(row + first + offsets, mask=inside, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(values).to(tl.int32, bitcast=True))
    amax = tl.max(highest).to(tl.float32, bitcast=True)
    amax = tl.where(amax == 0, largest, amax)
    return tl.div_rn(amax, largest), tl.minimum(tl.div_rn(largest, amax), 3.4028234663852886e38)


@triton.jit
def round_to_bits(values, inverse, DTYPE: tl.constexpr):
    """Scale and round to 8 bits, the lowest of the integers given; no value of the row is past the largest.

    Adding 1.5 * 2^23 rounds half to even, as torch does, and leaves the integer in the low bits: conversions, of which
    a processor does 16 in a cycle, would take as long as all the rest. The product is to be rounded before, as torch
    does: launch with ``enable_fp_fusion=False``.
    """
    if DTYPE.is_int():
        return (values * inverse + 12582912.0).to(tl.int32, bitcast=True)
    return (values * inverse).to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def semisparse_quantise_rows(x, rounded, scales, columns, largest, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Round one row."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    scale, inverse = row_scale(x + start, columns, largest, BLOCK)
    tl.store(scales + row, scale)
    offsets = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        values = tl.load(x + start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(rounded + start + first + offsets, round_to_bits(values, inverse, DTYPE).to(tl.int8), mask=inside)


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
        x, rounded.view(torch.int8), scales, columns, LARGEST[dtype],
        BLOCK=block, DTYPE=EIGHT_BITS[dtype], enable_fp_fusion=False,
        num_warps=WARPS,
    )  # fmt: skip
    return rounded, scales

"""`symmetric.quantise_rows` as one Triton kernel.

Each program quantises one row. It reads the row twice: for the scale, and then, from cache, to quantise it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisparse.quant.symmetric import LARGEST

BLOCK, WARPS = 4096, 8
"""Columns per iteration and warps of a program."""

EIGHT_BITS = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}
"""The Triton dtype of each 8-bit torch dtype."""


@triton.jit
def row_scale(row, columns, largest, BLOCK: tl.constexpr):
    """Return a row's scale and the scale's inverse; the row's ``columns`` values begin at pointer ``row``.

    The scale is the largest magnitude of the row, divided by ``largest``. Magnitudes are compared as int32 bit
    patterns: these have the same order, and NaN is the largest. `tl.max` on floats would ignore a NaN.
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
    """Multiply by the inverse scale and round to 8 bits, returned as the low byte of an int32.

    No product may exceed the dtype's largest code. For int8, adding 1.5 * 2^23 rounds half to even, as torch does, and
    leaves the integer in the low bits. Conversions would double the kernel's time: an SM does 16 a cycle. The product
    must be rounded before the addition, as in torch, so kernels launch with ``enable_fp_fusion=False``.
    """
    if DTYPE.is_int():
        return (values * inverse + 12582912.0).to(tl.int32, bitcast=True)
    return (values * inverse).to(DTYPE).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def semisparse_quantise_rows(x, codes, scales, columns, largest, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Quantise x [rows, columns] to codes [rows, columns] and scales [rows]. Grid: (rows,), one row per program."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    scale, inverse = row_scale(x + start, columns, largest, BLOCK)
    tl.store(scales + row, scale)
    offsets = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        values = tl.load(x + start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes + start + first + offsets, round_to_bits(values, inverse, DTYPE).to(tl.int8), mask=inside)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row to 8 bits with its own scale; the result is that of `symmetric.quantise_rows`.

    Args:
        x: [rows, columns] float, on a GPU.
        dtype: torch.int8 or torch.float8_e4m3fn.
    Returns:
        Codes [rows, columns] of ``dtype`` and scales [rows] float32.
    """
    x = x.contiguous()
    rows, columns = x.shape
    codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(x):  # where Triton launches
        semisparse_quantise_rows[(rows,)](
            x, codes.view(torch.int8), scales, columns, LARGEST[dtype],
            BLOCK=block, DTYPE=EIGHT_BITS[dtype], enable_fp_fusion=False,
            num_warps=WARPS,
        )  # fmt: skip
    return codes, scales

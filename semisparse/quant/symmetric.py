"""Symmetric 8-bit rounding: one scale for each row, no zero point."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127
"""The range is [-127, 127]: symmetric, so that a sign flip is exact."""

FP8_MAX = 448.0
"""The largest float8_e4m3fn."""

LARGEST = {torch.int8: float(INT8_MAX), torch.float8_e4m3fn: FP8_MAX}


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits at its own scale.

    Args:
        x: [rows, columns] float.
        dtype: torch.int8 or torch.float8_e4m3fn.
    Returns:
        [rows, columns] of ``dtype``, and scales [rows] float32 with ``x = scale * rounded`` up to rounding (half to
        even). A row of zeros has scale 1.

    Values are multiplied by the inverse of the scale (SlideSparse, algorithm 1): a division each would take half of the
    time of a GPU kernel. The inverse is finite, so that rows below 4e-37 lose digits rather than become NaN.
    """
    largest = LARGEST[dtype]
    amax = x.abs().amax(dim=1).float()
    amax = amax.masked_fill(amax == 0, largest)
    # A GPU multiplies by the inverse where the divisor is a number, and the last bit differs; a tensor is divided by.
    limit = torch.full_like(amax, largest)
    scale, inverse = amax / limit, (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scaled = (x.float() * inverse[:, None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale

"""Symmetric 8-bit quantisation with one scale per row and no zero point."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127
"""Codes are -127 to 127, so that negating one is exact."""

FP8_MAX = 448.0
"""The largest finite float8_e4m3fn."""

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtype of codes, by the ``quant`` of recipes."""

LARGEST = {torch.int8: float(INT8_MAX), torch.float8_e4m3fn: FP8_MAX}
"""The largest code of each 8-bit dtype."""


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row to 8 bits with its own scale.

    Values are multiplied by the inverse of the scale (SlideSparse, algorithm 1): dividing each value would take half of
    a GPU kernel's time. The inverse is clamped to a finite number: a row whose largest magnitude is below 4e-37 loses
    precision, but gets no NaN.

    Args:
        x: [rows, columns] float.
        dtype: torch.int8 or torch.float8_e4m3fn.
    Returns:
        Codes [rows, columns] of ``dtype`` and scales [rows] float32, ``x = scale * codes`` up to rounding half to even.
        The scale of a row of zeros is 1.
    """
    largest = LARGEST[dtype]
    amax = x.abs().amax(dim=1).float()
    amax = amax.masked_fill(amax == 0, largest)
    # On a GPU torch divides by a Python number as a product with its inverse, which changes the last bit.
    limit = torch.full_like(amax, largest)
    scale, inverse = amax / limit, (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scaled = (x.float() * inverse[:, None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def fake_quantise_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise and dequantise a weight [N, K] float, with a scale per row; returns float32."""
    codes, scale = quantise_rows(weight, dtype)
    return codes.float() * scale[:, None]

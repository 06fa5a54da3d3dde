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

    Values are multiplied by the inverse of the scale (SlideSparse, algorithm 1): dividing each value would be half
    of the GPU quantisation kernel's run time. The inverse is clamped to the largest float32, so no NaN arises. Rows
    whose largest magnitude is below the dtype's largest code over the largest float32 (int8 3.7e-37, fp8 1.3e-36)
    dequantise to values that are too small.

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
    # On CUDA torch computes x / python_scalar as x * (1 / scalar), which can differ in the last bit; a tensor divisor
    # is divided exactly.
    limit = torch.full_like(amax, largest)
    scale, inverse = amax / limit, (limit / amax).clamp(max=torch.finfo(torch.float32).max)
    scaled = (x.float() * inverse[:, None]).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def fake_quantise_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantise and dequantise a weight [N, K] float, with a scale per row; returns float32."""
    codes, scale = quantise_rows(weight, dtype)
    return codes.float() * scale[:, None]

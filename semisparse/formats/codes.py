"""The integers (or fp8 values), scales and zero points of a quantised weight, in one form for all formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A quantised weight: ``w[n, k] = (values[n, k] - zero[n, k // size]) * scale[n, k // size]``.

    Args:
        bits: bits per value.
        values: [N, K], uint8 from 0 to 2^bits - 1, int8, or float8_e4m3fn.
        scale: [N, ceil(K / size)], floating point.
        zero: [N, ceil(K / size)] float32, not necessarily integers; None for values without a zero point.
        size: columns per scale.
        rounds_x: whether kernels quantise x to 8 bits as well.
    """

    bits: int
    values: Tensor
    scale: Tensor
    zero: Tensor | None
    size: int
    rounds_x: bool

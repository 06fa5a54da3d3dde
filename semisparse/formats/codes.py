"""The numbers that a rounded weight is made of, in one form for all formats: what other software's files store."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A rounded weight: ``w[n, k] = (values[n, k] - zero[n, k // size]) * scale[n, k // size]``.

    Args:
        bits: per value.
        values: [N, K], uint8 from 0 to 2^bits - 1, int8, or float8_e4m3fn.
        scale: [N, ceil(K / size)] float.
        zero: [N, ceil(K / size)] float32, which may have fractions of a code; None for values without a zero point.
        size: columns per scale.
        rounds_x: whether kernels round x to 8 bits as well.
    """

    bits: int
    values: Tensor
    scale: Tensor
    zero: Tensor | None
    size: int
    rounds_x: bool

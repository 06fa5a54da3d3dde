"""Quantisation of groups along K to 8, 4, 3 or 2 bits (GQSA, equations 1 to 3).

A dequantised weight is ``(code - zero) * scale``; codes are integers from 0 to 2^bits - 1. The zero point is stored as
an 8-bit integer, ``zero = stored * 2^(bits - 8)``, and need not be a whole code. With 4-bit codes it is a multiple of
1/16, fine enough for tuning to move it.

Symmetric quantisation fixes the zero point at the middle code, so zero is a code: pruned weights inside a group stay
zero. There is one more code below the middle than above it. So the group's weight of largest magnitude gets code 0, and
the scale has the sign that makes it so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

SYMMETRIC_COLUMNS = 64
"""Columns per group of weights that are pruned one by one and quantised symmetrically. With a scale per 64 columns the
squared error of 4 bits is 8 % less than with a scale and a zero point per 128 (docs/decisions/bitmask-codes.md)."""

MIDDLE = 128
"""The stored zero point of symmetric quantisation: code 2^(bits - 1)."""

KINDS = {"w8": 8, "w4": 4, "w3": 3, "w2": 2, "w4a8": 4}
"""Bits per code, by the ``kind`` of recipes and formats; ``a8`` also quantises activations to 8 bits."""


@dataclass(frozen=True)
class GroupScales:
    """Scales and zero points of a weight [N, K] that is quantised in groups along K.

    Args:
        bits: per code.
        size: weights per group; the last group of a row may be shorter.
        scale: [N, ceil(K / size)] float, in the weight's dtype; above 0, or not 0 if symmetric.
        zero: [N, ceil(K / size)] float32, stored zero points, integers from 0 to 255; `MIDDLE` if symmetric.
        symmetric: whether the zero points stay at the middle code.
    """

    bits: int
    size: int
    scale: Tensor
    zero: Tensor
    symmetric: bool = False

    def to(self, device: torch.device) -> GroupScales:
        """Move the tensors to a device."""
        return replace(self, scale=self.scale.to(device), zero=self.zero.to(device))

    def select_groups(self, groups: Tensor) -> GroupScales:
        """Return the scales of the groups ([groups] int64, indices along K), in this order."""
        return replace(self, scale=self.scale[:, groups], zero=self.zero[:, groups])

    def rounded(self, weight: Tensor) -> Tensor:
        """Quantise and dequantise a weight [N, K], to the scale's dtype; pruned groups (all zero) stay zero."""
        values = self.values(self.codes(weight)) * stored_groups(weight, self.size)[..., None]
        return values.flatten(1)[:, : weight.shape[1]]

    def codes(self, weight: Tensor) -> Tensor:
        """Quantise a weight [N, K] to codes [N, groups, size] uint8 (equation 2)."""
        codes = split_groups(weight.float(), self.size) / self.scale.float()[..., None] + self._zero_point()
        return codes.round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Dequantise codes [N, groups, size] to values of the scale's dtype (equation 3)."""
        exact = (codes.float() - self._zero_point()) * self.scale.float()[..., None]
        return exact.to(self.scale.dtype)

    def within_range(self) -> GroupScales:
        """Return scales with which every code dequantises to a finite value: smaller where rounding led past the range.

        In float16 a group from -65504 to 65504 has the scale 8736 in 4 bits; its last code would be 65520, infinity.
        """
        zero = self._zero_point().squeeze(-1)
        limit = torch.finfo(self.scale.dtype).max / torch.maximum(zero, 2**self.bits - 1 - zero)
        beyond = self.scale.float().abs() > limit
        smaller = (limit * (1 - torch.finfo(self.scale.dtype).eps)).copysign(self.scale.float()).to(self.scale.dtype)
        return replace(self, scale=torch.where(beyond, smaller, self.scale))

    def _zero_point(self) -> Tensor:
        """Return the zero points in codes, [N, groups, 1] float32."""
        return self.zero.float()[..., None] * 2.0 ** (self.bits - 8)


def split_groups(x: Tensor, size: int) -> Tensor:
    """Split rows [N, K] into groups [N, ceil(K / size), size]; the last one is padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def stored_groups(weight: Tensor, size: int) -> Tensor:
    """Return which groups of a weight [N, K] have a non-zero: [N, ceil(K / size)] bool. The others are not stored."""
    return (split_groups(weight, size) != 0).any(-1)


def scales_of(weight: Tensor, bits: int, size: int, dtype: torch.dtype, symmetric: bool = False) -> GroupScales:
    """Compute scales and zero points such that the codes span each group and zero (equation 1).

    Args:
        weight: [N, K] float.
        bits: per code.
        size: weights per group.
        dtype: of the scales.
        symmetric: whether zero is the middle code; the weight of largest magnitude is then code 0.
    """
    groups = split_groups(weight.float(), size)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    if symmetric:
        scale = torch.where(high > -low, high, low) / -(2.0 ** (bits - 1))
    else:
        scale = (high - low) / torch.full_like(low, 2**bits - 1)
    scale = scale.to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if symmetric:
        return GroupScales(bits, size, scale, torch.full_like(low, MIDDLE), symmetric)
    zero = (-low / scale.float() * 2.0 ** (8 - bits)).round().clamp(0, 255)
    return GroupScales(bits, size, scale, zero).within_range()


def fake_quantise(weight: Tensor, scale: Tensor, zero: Tensor, bits: int, size: int) -> Tensor:
    """Quantise and dequantise a weight, with straight-through gradients; these are 0 for codes that are clamped.

    Args:
        weight: [N, K] float32.
        scale: [N, ceil(K / size)] float32, not 0.
        zero: [N, ceil(K / size)] float32, stored zero points, 0 to 255.
        bits: per code.
        size: weights per group.
    Returns:
        [N, K] float32.
    """
    codes = straight_through_codes(weight, scale, zero, bits, size)
    return dequantise(codes, scale, zero, bits)[:, : weight.shape[1]]


def straight_through_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int, size: int) -> Tensor:
    """Return a weight's codes, [N, ceil(K / size), size] float32; arguments and gradients as in `fake_quantise`."""
    exact = split_groups(weight, size) / scale[..., None] + (zero * 2.0 ** (bits - 8))[..., None]
    return straight_through(exact.round(), exact).clamp(0, 2**bits - 1)


def dequantise(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the values of codes [N, groups, size], [N, groups * size] float32, with gradients of all three tensors."""
    return ((codes - (zero * 2.0 ** (bits - 8))[..., None]) * scale[..., None]).flatten(1)


def straight_through(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return the rounded value with the gradient of the exact one (straight-through estimator)."""
    return exact + (rounded - exact).detach()

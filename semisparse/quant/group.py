"""Asymmetric rounding of groups along K to 8, 4, 3 or 2 bits (GQSA, equations 1 to 3).

A group's weight is ``(code - zero) * scale``, the codes 0 to 2^bits - 1. The zero point is stored in 8 bits that span
the codes: ``zero = stored * 2^(bits - 8)``, so that four bits have one in sixteenths of a code, which tuning can move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = {"w8": 8, "w4": 4, "w3": 3, "w2": 2, "w4a8": 4}
"""Bits of a code, by the name that recipes and formats give the rounding; with ``a8`` activations have 8 bits, too."""


@dataclass(frozen=True)
class GroupScales:
    """How each group of ``size`` weights along K is rounded.

    Args:
        bits: of a code.
        size: weights of a group; the last one of a row may be shorter.
        scale: [N, ceil(K / size)] float, above 0, in the dtype of the weight.
        zero: [N, ceil(K / size)] float32, the stored zero points, 0 to 255.
    """

    bits: int
    size: int
    scale: Tensor
    zero: Tensor

    def to(self, device: torch.device) -> GroupScales:
        """Give the scales on a device."""
        return replace(self, scale=self.scale.to(device), zero=self.zero.to(device))

    def take(self, groups: Tensor) -> GroupScales:
        """Give the scales of other groups of the rows: [groups] int64."""
        return replace(self, scale=self.scale[:, groups], zero=self.zero[:, groups])

    def rounded(self, weight: Tensor) -> Tensor:
        """Round a weight [N, K] and give it back, in the scale's dtype; a group of zeros, which is dropped, stays."""
        values = self.values(self.codes(weight)) * stored_groups(weight, self.size)[..., None]
        return values.flatten(1)[:, : weight.shape[1]]

    def codes(self, weight: Tensor) -> Tensor:
        """Round a weight [N, K] to codes, [N, groups, size] uint8 (equation 2)."""
        codes = in_groups(weight.float(), self.size) / self.scale.float()[..., None] + self._zero_point()
        return codes.round().clamp(0, 2**self.bits - 1).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Give what codes [N, groups, size] stand for, in the scale's dtype (equation 3)."""
        exact = (codes.float() - self._zero_point()) * self.scale.float()[..., None]
        return exact.to(self.scale.dtype)

    def _zero_point(self) -> Tensor:
        return self.zero.float()[..., None] * 2.0 ** (self.bits - 8)


def in_groups(x: Tensor, size: int) -> Tensor:
    """Cut rows [N, K] into groups, [N, ceil(K / size), size], the last one filled with zeros."""
    return F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def stored_groups(weight: Tensor, size: int) -> Tensor:
    """Say which groups of a weight [N, K] are not all zero: [N, ceil(K / size)] bool."""
    return (in_groups(weight, size) != 0).any(-1)


def scales_of(weight: Tensor, bits: int, size: int, dtype: torch.dtype) -> GroupScales:
    """Choose scales and zero points so that the codes span each group and zero (equation 1).

    Args:
        weight: [N, K] float.
        bits: of a code.
        size: weights of a group.
        dtype: of the scales.
    """
    groups = in_groups(weight.float(), size)
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = (high - low) / torch.full_like(low, 2**bits - 1)
    scale = scale.to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale.float() * 2.0 ** (8 - bits)).round().clamp(0, 255)
    return GroupScales(bits, size, scale, zero)


def fake_quantise(weight: Tensor, scale: Tensor, zero: Tensor, bits: int, size: int) -> Tensor:
    """Round a weight and give it back, with gradients: straight through the rounding, none outside the codes' range.

    Args:
        weight: [N, K] float32.
        scale: [N, ceil(K / size)] float32, above 0.
        zero: [N, ceil(K / size)] float32, stored zero points, 0 to 255.
        bits: of a code.
        size: weights of a group.
    Returns:
        [N, K] float32.
    """
    point = (zero * 2.0 ** (bits - 8))[..., None]
    wide = scale[..., None]
    places = in_groups(weight, size) / wide + point
    codes = straight_through(places.round(), places).clamp(0, 2**bits - 1)
    return ((codes - point) * wide).flatten(1)[:, : weight.shape[1]]


def straight_through(rounded: Tensor, exact: Tensor) -> Tensor:
    """Give a rounded number the gradient of the exact one."""
    return exact + (rounded - exact).detach()

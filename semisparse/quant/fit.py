"""Scales and zero points that minimise a weighted rounding error, instead of those that span each group.

At 2 bits a group's largest weight sets a scale that is too large for the others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from semisparse.quant.group import GroupScales, scales_of, split_groups

FACTORS = (1.0, 0.925, 0.85, 0.775, 0.7, 0.625, 0.55)
"""The shares of a group's range that are tried."""

REFITS = 3
"""Least-squares fits of scale and zero point to the codes, after the best share."""


def fit_scales(
    weight: Tensor, importance: Tensor, bits: int, size: int, dtype: torch.dtype, symmetric: bool = False
) -> GroupScales:
    """Compute scales and zero points with a small sum of ``importance * (rounded - weight)^2`` in each group.

    Args:
        weight: [N, K] float; zeros count as pruned if symmetric.
        importance: [K] float32, of the columns.
        bits: per code.
        size: weights per group.
        dtype: of the scales.
        symmetric: as in `scales_of`.
    """
    groups = split_groups(weight.float(), size)
    factor = split_groups(importance[None].float(), size)
    if symmetric:
        factor = factor * (groups != 0)
    spanning = scales_of(weight, bits, size, dtype, symmetric)
    starts = [spanning, replace(spanning, scale=-spanning.scale)] if symmetric else [spanning]
    best = spanning
    least = _error(groups, factor, best)
    for start in starts:
        for share in FACTORS:
            best, least = _better(best, least, groups, factor, _shrunk(start, share))
    for _ in range(REFITS):
        best, least = _better(best, least, groups, factor, _refitted(groups, factor, best))
    return best


def _shrunk(scales: GroupScales, share: float) -> GroupScales:
    """Return scales that span a share of the range; the zero point, in codes, is that of the whole range."""
    scale = (scales.scale.float() * share).to(scales.scale.dtype)
    return replace(scales, scale=torch.where(scale == 0, scales.scale, scale))


def _codes(groups: Tensor, scales: GroupScales) -> tuple[Tensor, Tensor]:
    """Return codes [N, groups, size] float32, and zero points in codes [N, groups, 1]."""
    zero = scales.zero.float()[..., None] * 2.0 ** (scales.bits - 8)
    return (groups / scales.scale.float()[..., None] + zero).round().clamp(0, 2**scales.bits - 1), zero


def _error(groups: Tensor, factor: Tensor, scales: GroupScales) -> Tensor:
    """Return the weighted squared error of each group, [N, groups]."""
    codes, zero = _codes(groups, scales)
    return ((codes - zero) * scales.scale.float()[..., None] - groups).square().mul(factor).sum(-1)


def _better(
    best: GroupScales, least: Tensor, groups: Tensor, factor: Tensor, other: GroupScales
) -> tuple[GroupScales, Tensor]:
    """Return the better of two scales for each group, and its error."""
    error = _error(groups, factor, other)
    wins = error < least
    merged = replace(
        best, scale=torch.where(wins, other.scale, best.scale), zero=torch.where(wins, other.zero, best.zero)
    )
    return merged, torch.where(wins, error, least)


def _refitted(groups: Tensor, factor: Tensor, scales: GroupScales) -> GroupScales:
    """Return the least-squares scales and zero points for the codes of ``scales``."""
    codes, zero = _codes(groups, scales)
    if scales.symmetric:
        centred, weights = codes - zero, groups
    else:
        total = factor.sum(-1, keepdim=True).clamp_min(1e-30)
        mean_code, mean_weight = ((factor * x).sum(-1, keepdim=True) / total for x in (codes, groups))
        centred, weights = codes - mean_code, groups - mean_weight
    power = (factor * centred.square()).sum(-1)
    scale = (factor * centred * weights).sum(-1) / power
    scale = scale.to(scales.scale.dtype)
    usable = (power > 0) & (scale != 0 if scales.symmetric else scale > 0) & scale.isfinite()
    scale = torch.where(usable, scale, scales.scale)
    if scales.symmetric:
        return replace(scales, scale=scale)
    fitted = (mean_code - mean_weight / scale.float()[..., None]).squeeze(-1) * 2.0 ** (8 - scales.bits)
    return replace(scales, scale=scale, zero=torch.where(usable, fitted.round().clamp(0, 255), scales.zero))

"""Scales and zero points that minimise a weighted rounding error, instead of those that span each group.

At 2 bits a group's largest weight sets a scale that is too large for the others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from semisparse.quant.group import GroupScales, scales_of, split_groups

SHARES = {2: (1.0, 0.85, 0.7, 0.55, 0.4), 3: (1.0, 0.9, 0.8, 0.7), 4: (1.0, 0.92, 0.84)}
"""By bits per code, the shares of a group's range that are tried: each of them above zero with each below zero."""

SYMMETRIC_SHARES = tuple(1.0 - 0.05 * step for step in range(8))
"""The shares of a symmetric range, each with both signs of the scale."""

REFITS = 3
"""Least-squares fits of scale and zero point to the codes, after the best shares have been found."""

MAX_ELEMENTS = 1 << 25
"""Maximum number of weights that are rounded at a time: as many ranges are tried together as fit into it."""


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
    if has_fit_kernel(weight):
        return _by_kernel(weight.float(), importance.float(), bits, size, dtype, symmetric)
    groups = split_groups(weight.float(), size)
    factor = split_groups(importance[None].float(), size)
    if symmetric:
        factor = factor * (groups != 0)
    best = scales_of(weight, bits, size, dtype, symmetric)
    least = _error(groups, factor, best)
    tried = _ranges(groups, best)
    step = max(1, MAX_ELEMENTS // groups.numel())
    for start in range(0, len(tried.scale), step):
        some = replace(tried, scale=tried.scale[start : start + step], zero=tried.zero[start : start + step])
        error, at = _error(groups, factor, some).min(0)
        chosen = replace(best, scale=some.scale.gather(0, at[None])[0], zero=some.zero.gather(0, at[None])[0])
        best, least = _better(best, least, chosen, error)
    for _ in range(REFITS):
        refitted = _refitted(groups, factor, best)
        best, least = _better(best, least, refitted, _error(groups, factor, refitted))
    return best.within_range()


def has_fit_kernel(weight: Tensor) -> bool:
    """Return whether the Triton kernel of fit_triton.py fits the scales of this weight."""
    return weight.is_cuda and find_spec("triton") is not None


def shares_of(bits: int, symmetric: bool = False) -> tuple[float, ...]:
    """Return the shares of a range that are tried."""
    return SYMMETRIC_SHARES if symmetric else SHARES.get(bits, (1.0,))


def _by_kernel(
    weight: Tensor, importance: Tensor, bits: int, size: int, dtype: torch.dtype, symmetric: bool
) -> GroupScales:
    from semisparse.quant.fit_triton import fit

    tried = [shares_of(bits, symmetric)]
    scale, zero = fit(weight.contiguous(), importance, [bits], tried, size, dtype, REFITS, symmetric=symmetric)
    return GroupScales(bits, size, scale.to(dtype), zero, symmetric)


def _ranges(groups: Tensor, spanning: GroupScales) -> GroupScales:
    """Return the scales and zero points of every range that is tried, [ranges, N, groups]."""
    bits, dtype = spanning.bits, spanning.scale.dtype
    if spanning.symmetric:
        scale = (spanning.scale.float() * _signed_shares(groups.device)[:, None, None]).to(dtype)
        scale = torch.where(scale == 0, spanning.scale, scale)
        return replace(spanning, scale=scale, zero=spanning.zero.expand_as(scale))
    below, above = _pairs_of_shares(bits, groups.device)[:, :, None, None]
    low, high = groups.amin(-1).clamp_max(0) * below, groups.amax(-1).clamp_min(0) * above
    scale = ((high - low) / (2**bits - 1)).to(dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low / scale.float() * 2.0 ** (8 - bits)).round().clamp(0, 255)
    return replace(spanning, scale=scale, zero=zero)


@lru_cache
def _signed_shares(device: torch.device) -> Tensor:
    """Return all shares of a symmetric range, [shares]. A copy to a GPU waits for it, so each is made once."""
    return torch.tensor([sign * share for share in SYMMETRIC_SHARES for sign in (1, -1)], device=device)


@lru_cache
def _pairs_of_shares(bits: int, device: torch.device) -> Tensor:
    """Return the pairs of shares below and above zero, [2, pairs]."""
    shares = torch.tensor(shares_of(bits), device=device)
    return torch.cartesian_prod(shares, shares).T


def _codes(groups: Tensor, scales: GroupScales) -> tuple[Tensor, Tensor]:
    """Return codes [..., N, groups, size] float32, and zero points in codes [..., N, groups, 1]."""
    zero = scales.zero.float()[..., None] * 2.0 ** (scales.bits - 8)
    return (groups / scales.scale.float()[..., None] + zero).round().clamp(0, 2**scales.bits - 1), zero


def _error(groups: Tensor, factor: Tensor, scales: GroupScales) -> Tensor:
    """Return the weighted squared error of each group, [..., N, groups]."""
    codes, zero = _codes(groups, scales)
    return ((codes - zero) * scales.scale.float()[..., None] - groups).square().mul(factor).sum(-1)


def _better(best: GroupScales, least: Tensor, other: GroupScales, error: Tensor) -> tuple[GroupScales, Tensor]:
    """Return the better of two scales for each group, and its error."""
    wins = error < least
    scale = torch.where(wins, other.scale, best.scale)
    return replace(best, scale=scale, zero=torch.where(wins, other.zero, best.zero)), torch.where(wins, error, least)


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

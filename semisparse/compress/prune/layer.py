"""Prune one layer's weight by a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.sparsegpt import factorise, order_by_loss, prune_columns
from semisparse.compress.prune.statistics import Statistics
from semisparse.compress.prune.wanda import wanda
from semisparse.compress.recipe import Recipe
from semisparse.errors import InputError
from semisparse.patterns import Pattern


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned weight.

    Args:
        weight: [N, K] float32, with exact zeros where pruned.
        outcome: what was done, such as ``sparsegpt`` or ``sparsegpt damping 0.1``.
        error: the output's relative error, ``||(w' - w) x|| / ||w x||`` over the calibration tokens.
    """

    weight: Tensor
    outcome: str
    error: float


def prune_layer(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> PrunedLayer:
    """Prune a layer's weight to a pattern.

    Args:
        weight: [N, K], any float dtype.
        pattern: what the result obeys.
        statistics: of the layer's calibration inputs.
        recipe: its `prune` other than ``none``, and the settings of that.

    Raises:
        InputError: the weight or the statistics hold NaN or infinity.
    """
    weight = weight.float()
    require_finite(weight)
    if not all(mean.isfinite().all() for mean in (statistics.hessian, statistics.cross) if mean is not None):
        raise InputError("its calibration activations hold NaN or infinity, or are too large for float32")
    if recipe.prune == "magnitude":
        pruned, outcome = magnitude(weight, pattern), "magnitude"
    elif recipe.prune == "wanda":
        pruned, outcome = wanda(weight, pattern, statistics.hessian), "wanda"
    else:
        pruned, outcome = _sparsegpt(weight, pattern, statistics, recipe)
    return PrunedLayer(pruned, outcome, _relative_error(pruned, weight, statistics.hessian))


def require_finite(weight: Tensor) -> None:
    """Raise unless every weight is finite.

    Raises:
        InputError: one is not.
    """
    if not weight.isfinite().all():
        raise InputError("the weight holds NaN or infinity; the model is damaged")


def _sparsegpt(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> tuple[Tensor, str]:
    """Prune in units that give each input a mean square of 1, so that damping weighs the same on each of them."""
    scale = statistics.hessian.diagonal().sqrt()
    dead = scale == 0
    scale = scale.masked_fill(dead, 1)
    hessian = statistics.hessian / torch.outer(scale, scale)
    scaled = (weight * scale).masked_fill(dead, 0)

    factor = factorise(hessian, recipe.damping)
    goal = scaled
    if factor and statistics.cross is not None:
        missing = statistics.cross / scale - scaled @ hessian
        goal = scaled + missing @ factor.upper.T @ factor.upper
    order = torch.arange(len(scale), device=scale.device)
    if factor and recipe.order == "windows":
        order = order_by_loss(goal, factor, pattern)
        hessian, goal = hessian[order][:, order], goal[:, order]
        factor = factorise(hessian, recipe.damping)
    if factor is None:
        return wanda(weight, pattern, statistics.hessian), "wanda (hessian singular)"

    pruned, kept = prune_columns(goal, factor.upper, pattern)
    if recipe.refine == "cg":
        hessian.diagonal().add_(factor.damping)
        pruned = conjugate_gradient(pruned, kept, hessian, goal)
    return pruned[:, order.argsort()] / scale, factor.outcome


def _relative_error(pruned: Tensor, weight: Tensor, hessian: Tensor) -> float:
    change = pruned - weight
    lost = (change @ hessian * change).sum().clamp_min(0)
    power = (weight @ hessian * weight).sum()
    return float((lost / power).sqrt()) if power > 0 else 0.0

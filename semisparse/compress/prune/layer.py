"""Prune one layer's weight by a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.rounding import Rounding
from semisparse.compress.prune.sparsegpt import Factor, factorise, order_by_loss, prune_columns, round_columns
from semisparse.compress.prune.statistics import Statistics
from semisparse.compress.prune.wanda import wanda
from semisparse.compress.recipe import Recipe
from semisparse.errors import InputError
from semisparse.patterns import Pattern
from semisparse.quant.group import GroupScales, scales_of


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned weight.

    Args:
        weight: [N, K] float32, with exact zeros where pruned.
        outcome: what was done, such as ``sparsegpt`` or ``sparsegpt damping 0.1``.
        error: the output's relative error, ``||(w' - w) x|| / ||w x||`` over the calibration tokens.
        scales: how what is kept was rounded; None if it was not.
    """

    weight: Tensor
    outcome: str
    error: float
    scales: GroupScales | None = None


def prune_layer(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> PrunedLayer:
    """Prune a layer's weight to a pattern.

    Args:
        weight: [N, K], any float dtype, which scales will have.
        pattern: what the result obeys.
        statistics: of the layer's calibration inputs.
        recipe: its `prune` other than ``none``, and the settings of that.

    Raises:
        InputError: the weight or the statistics hold NaN or infinity.
    """
    return next(prune_levels(weight, [pattern], statistics, recipe))


def prune_levels(
    weight: Tensor, patterns: Sequence[Pattern], statistics: Statistics, recipe: Recipe
) -> Iterator[PrunedLayer]:
    """Prune a layer's weight to each of several patterns of one family, factorising the Hessian once.

    Args:
        patterns: the first is pruned exactly as `prune_layer` does; its order of the columns serves the others, too.
            The other arguments are those of `prune_layer`.

    Raises:
        InputError: as in `prune_layer`.
    """
    dtype, weight = weight.dtype, weight.float()
    require_finite(weight)
    if not all(mean.isfinite().all() for mean in (statistics.hessian, statistics.cross) if mean is not None):
        raise InputError("its calibration activations hold NaN or infinity, or are too large for float32")
    problem = _scaled(weight, patterns[0], statistics, recipe) if recipe.prune == "sparsegpt" else None
    for pattern in patterns:
        scales = None
        if recipe.prune == "magnitude":
            pruned, outcome = magnitude(weight, pattern), "magnitude"
        elif recipe.prune == "wanda":
            pruned, outcome = wanda(weight, pattern, statistics.hessian), "wanda"
        elif problem is None:
            pruned, outcome = wanda(weight, pattern, statistics.hessian), "wanda (hessian singular)"
        else:
            (pruned, scales), outcome = _sparsegpt(problem, pattern, recipe, dtype), problem.factor.outcome
        if recipe.code_bits:
            scales = scales or scales_of(pruned, recipe.code_bits, pattern.step, dtype)
            pruned = scales.rounded(pruned).float()
        yield PrunedLayer(pruned, outcome, _relative_error(pruned, weight, statistics.hessian), scales)


def require_finite(weight: Tensor) -> None:
    """Raise unless every weight is finite.

    Raises:
        InputError: one is not.
    """
    if not weight.isfinite().all():
        raise InputError("the weight holds NaN or infinity; the model is damaged")


class _Scaled(NamedTuple):
    """A layer's problem in units that give each input a mean square of 1, so that damping weighs the same on each.

    Args:
        goal: [N, K] float32, the best weight if all were kept, its columns in the order to prune them.
        hessian: [K, K] float32, damped, in the same order.
        factor: of its inverse.
        order: [K] int64, the columns of the layer's weight in that order.
        scale: [K] float32, what the weight's columns were multiplied by, in the weight's own order.
    """

    goal: Tensor
    hessian: Tensor
    factor: Factor
    order: Tensor
    scale: Tensor


def _scaled(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> _Scaled | None:
    """Prepare a layer for SparseGPT; None if its Hessian is singular."""
    scale = statistics.hessian.diagonal().sqrt()
    dead = scale == 0
    scale = scale.masked_fill(dead, 1)
    hessian = statistics.hessian / torch.outer(scale, scale)
    goal = (weight * scale).masked_fill(dead, 0)

    factor = factorise(hessian, recipe.damping)
    if factor is None:
        return None
    if statistics.cross is not None:
        missing = statistics.cross / scale - goal @ hessian
        goal = goal + missing @ factor.upper.T @ factor.upper
    order = order_by_loss(goal, factor, pattern, windows=recipe.order == "windows")
    if (order.diff() != 1).any():
        hessian, goal = hessian[order][:, order], goal[:, order]
        factor = factorise(hessian, recipe.damping)
        if factor is None:
            return None
    hessian.diagonal().add_(factor.damping)
    return _Scaled(goal, hessian, factor, order, scale)


def _sparsegpt(
    problem: _Scaled, pattern: Pattern, recipe: Recipe, dtype: torch.dtype
) -> tuple[Tensor, GroupScales | None]:
    """Prune, and round if the recipe does: in the same pass, or after the conjugate gradients in another."""
    upper, back = problem.factor.upper, problem.order.argsort()
    rounding = None
    if recipe.code_bits:
        rounding = Rounding(recipe.code_bits, pattern.step, problem.scale[problem.order], dtype)
    solved = recipe.refine == "cg"
    pruned, kept = prune_columns(problem.goal, upper, pattern, None if solved else rounding)
    if solved:
        pruned = conjugate_gradient(pruned, kept, problem.hessian, problem.goal)
        if rounding:
            pruned = round_columns(pruned, kept, upper, rounding)
    groups = problem.order[:: pattern.step].argsort()  # whole groups were ordered, so a group is where its first is
    return pruned[:, back] / problem.scale, rounding.scales.take(groups) if rounding else None


def _relative_error(pruned: Tensor, weight: Tensor, hessian: Tensor) -> float:
    change = pruned - weight
    lost = (change @ hessian * change).sum().clamp_min(0)
    power = (weight @ hessian * weight).sum()
    return float((lost / power).sqrt()) if power > 0 else 0.0

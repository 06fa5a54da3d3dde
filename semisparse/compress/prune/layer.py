"""Prune one linear layer's weight as a recipe says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.quantise import ColumnQuantiser, round_by_descent, scales_for
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.sparsegpt import (
    EQUATION_4,
    PUBLISHED,
    REPEATED,
    InverseFactor,
    factorise,
    order_by_loss,
    prune_columns,
    quantise_columns,
)
from semisparse.compress.prune.statistics import Statistics
from semisparse.compress.prune.wanda import wanda
from semisparse.compress.recipe import Recipe
from semisparse.errors import InputError
from semisparse.patterns import Group, Pattern
from semisparse.quant.group import GroupScales


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned weight.

    Args:
        weight: [N, K] float32, exactly zero where pruned.
        outcome: what was done, such as ``sparsegpt`` or ``sparsegpt damping 0.1``.
        error: relative error of the output over the calibration tokens, ``||(w' - w) x|| / ||w x||``.
        scales: of the quantised groups; None if the weight is not quantised.
    """

    weight: Tensor
    outcome: str
    error: float
    scales: GroupScales | None = None


def prune_layer(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> PrunedLayer:
    """Prune a linear layer's weight to a pattern.

    Args:
        weight: [N, K], any float dtype; the scales get this dtype.
        pattern: that the result obeys.
        statistics: of the linear layer's calibration inputs.
        recipe: `prune`, which is not ``none``, and the settings for it.

    Raises:
        InputError: the weight or the statistics hold NaN or infinity.
    """
    return next(prune_levels(weight, [pattern], statistics, recipe))


def prune_levels(
    weight: Tensor, patterns: Sequence[Pattern], statistics: Statistics, recipe: Recipe
) -> Iterator[PrunedLayer]:
    """Prune a linear layer's weight to each of several patterns of one class; the Hessian is factorised once.

    Args:
        weight: as in `prune_layer`.
        patterns: the first determines the order in which columns are pruned for all of them; only the first result is
            the same as that of `prune_layer`.
        statistics: as in `prune_layer`.
        recipe: as in `prune_layer`.

    Raises:
        InputError: as in `prune_layer`.
    """
    dtype, weight = weight.dtype, weight.float()
    require_finite(weight)
    if not all(mean.isfinite().all() for mean in (statistics.hessian, statistics.cross) if mean is not None):
        raise InputError("its calibration activations hold NaN or infinity, or are too large for float32")
    problem = _normalise(weight, patterns[0], statistics, recipe) if recipe.prune.startswith("sparsegpt") else None
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
            scales = scales or scales_for(pruned, pattern, recipe.code_bits, dtype)
            pruned = scales.rounded(pruned).float()
        outcome += f", {statistics.note}" if statistics.note else ""
        yield PrunedLayer(pruned, outcome, _relative_error(pruned, weight, statistics.hessian), scales)


def require_finite(weight: Tensor) -> None:
    """Raise unless every weight is finite.

    Raises:
        InputError: a weight is NaN or infinite.
    """
    if not weight.isfinite().all():
        raise InputError("the weight holds NaN or infinity; the model is damaged")


class _Problem(NamedTuple):
    """A linear layer's least-squares problem, normalised.

    Each input feature is scaled to a mean square of 1, so that damping has the same relative effect on each. For
    ``sparsegpt-published`` all features have one scale, such that the mean of their mean squares is 1.

    Args:
        goal: [N, K] float32, the best weight if none is pruned; columns in pruning order.
        hessian: [K, K] float32, damped, in the same order.
        factor: of the Hessian's inverse.
        order: [K] int64, the pruning order: indices of the weight's columns.
        scale: [K] float32, the factor that each column was multiplied by, in the weight's own order.
    """

    goal: Tensor
    hessian: Tensor
    factor: InverseFactor
    order: Tensor
    scale: Tensor


def _normalise(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe) -> _Problem | None:
    """Set up the problem that SparseGPT solves; None if the Hessian is singular."""
    published = recipe.prune == "sparsegpt-published"
    power = statistics.hessian.diagonal()
    dead = power == 0
    # The authors damp by a share of the mean of the diagonal.
    scale = (power.mean().expand_as(power) if published else power).sqrt().masked_fill(dead, 1)
    hessian = statistics.hessian / torch.outer(scale, scale)
    goal = (weight * scale).masked_fill(dead, 0)

    factor = factorise(hessian, recipe.damping)
    if factor is None:
        return None
    if statistics.cross is not None:
        missing = statistics.cross / scale - goal @ hessian
        goal = goal + missing @ factor.upper.T @ factor.upper
    order = torch.arange(len(scale), device=scale.device)
    if not published:
        order = order_by_loss(goal, factor, pattern, windows=recipe.order == "windows")
    if (order.diff() != 1).any():
        hessian, goal = hessian[order][:, order], goal[:, order]
        factor = factorise(hessian, recipe.damping)
        if factor is None:
            return None
    hessian.diagonal().add_(factor.damping)
    return _Problem(goal, hessian, factor, order, scale)


def _sparsegpt(
    problem: _Problem, pattern: Pattern, recipe: Recipe, dtype: torch.dtype
) -> tuple[Tensor, GroupScales | None]:
    """Prune and, if the recipe says so, quantise.

    Groups of a `Group` pattern are quantised in the loop that prunes; with conjugate gradients, in a second loop after
    them. Weights of other patterns are quantised at the end.

    Returns:
        The weight [N, K] float32, and the scales of its groups in ``dtype``; None if it is not quantised.
    """
    upper, restore_order = problem.factor.upper, problem.order.argsort()
    quantiser = None
    if recipe.code_bits and isinstance(pattern, Group):
        quantiser = ColumnQuantiser(recipe.code_bits, pattern.step, problem.scale[problem.order], dtype)
    published = recipe.prune == "sparsegpt-published"
    refined = recipe.refine == "cg" and not published
    rule = PUBLISHED if published else {"loss": REPEATED, "eq4": EQUATION_4}[recipe.saliency]
    pruned, kept = prune_columns(problem.goal, upper, pattern, None if refined else quantiser, rule)
    if refined:
        pruned = conjugate_gradient(pruned, kept, problem.hessian, problem.goal)
        if quantiser:
            pruned = quantise_columns(pruned, kept, upper, quantiser)
    weight = pruned[:, restore_order] / problem.scale
    if not recipe.code_bits:
        return weight, None
    if quantiser:
        # Groups stay whole in the pruning order, so the order of their first columns is the order of the groups.
        return weight, quantiser.scales.select_groups(problem.order[:: pattern.step].argsort())
    scales = scales_for(weight, pattern, recipe.code_bits, dtype)
    pruned = round_by_descent(
        pruned, kept, problem.hessian, problem.goal, scales, problem.order, problem.scale[problem.order]
    )
    return pruned[:, restore_order] / problem.scale, scales


def _relative_error(pruned: Tensor, weight: Tensor, hessian: Tensor) -> float:
    change = pruned - weight
    lost = (change @ hessian * change).sum().clamp_min(0)
    power = (weight @ hessian * weight).sum()
    return float((lost / power).sqrt()) if power > 0 else 0.0

"""The least-squares problem that SparseGPT solves for a linear layer: normalised, its columns in pruning order."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.compress.prune.factor import InverseFactor, factorise
from semisparse.compress.prune.order import losses, order_by_loss
from semisparse.compress.prune.rows import Rows
from semisparse.compress.prune.statistics import Statistics
from semisparse.compress.recipe import Recipe
from semisparse.compress.three_pass import multiplier
from semisparse.patterns import Pattern


class Problem(NamedTuple):
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


class Normalised:
    """What of a linear layer's problem does not depend on the pattern: as in `Problem`, columns in their own order."""

    def __init__(self, goal: Tensor, hessian: Tensor, factor: InverseFactor, scale: Tensor) -> None:
        self._goal, self._hessian, self._factor, self._scale = goal, hessian, factor, scale

    def ordered(self, pattern: Pattern, recipe: Recipe, rows: Rows, keep: bool) -> Problem | None:
        """Put the columns in pruning order; None if the Hessian is singular then.

        Args:
            pattern: determines the order.
            recipe: as in `prune_layer`.
            rows: as in `prune_layer`.
            keep: whether other patterns follow; else this object's matrices, which take memory, are dropped.
        """
        goal, hessian, factor, scale = self._goal, self._hessian, self._factor, self._scale
        if not keep:
            del self._goal, self._hessian, self._factor
        order = torch.arange(len(scale), device=scale.device)
        if recipe.prune != "sparsegpt-published":
            loss = rows.total(partial(losses, factor=factor, pattern=pattern), goal)
            order = order_by_loss(loss, pattern, windows=recipe.order == "windows")
        if (order.diff() != 1).any():
            hessian, goal = hessian[order][:, order], goal[:, order]
            reordered = factorise(hessian, recipe.damping)
            if reordered is None:
                return None
            factor = reordered
        elif keep:
            hessian = hessian.clone()
        hessian.diagonal().add_(factor.damping)
        return Problem(goal, hessian, factor, order, scale)


def normalise(weight: Tensor, statistics: Statistics, recipe: Recipe, rows: Rows) -> Normalised | None:
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
        goal = rows.joined(partial(_moved_goal, hessian, factor.upper), goal, statistics.cross / scale)
    return Normalised(goal, hessian, factor, scale)


def _moved_goal(hessian: Tensor, upper: Tensor, weight: Tensor, cross: Tensor) -> Tensor:
    """Return the best weight if none is pruned, [N, K]: ``cross @ H^-1``, computed as a change of the weight."""
    missing = cross - multiplier(hessian)(weight)
    return weight + multiplier(upper)(multiplier(upper.T)(missing))

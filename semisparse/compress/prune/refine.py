"""Optimise the kept weights once the mask is final."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.compress.three_pass import multiplier

STEPS = 10
"""Conjugate gradient steps. On three models, 5 steps give up to 4 % more KL; 20 and 40 change it by 2 % or less."""


def conjugate_gradient(weight: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor) -> Tensor:
    """Minimise ``(w - goal) H (w - goal)^T`` over the kept weights w of each row by `STEPS` conjugate gradient steps.

    All rows are iterated together; each has its own step size. With a Hessian of unit diagonal this is the
    Jacobi-preconditioned method.

    Args:
        weight: [N, K] float, the start, zero where not kept.
        kept: [N, K] bool, the mask.
        hessian: [K, K] float, positive definite.
        goal: [N, K] float, the weight that minimises the layer's output error if nothing is pruned.
    Returns:
        [N, K] float, zero where not kept.
    """
    through = multiplier(hessian)
    residual = through(goal - weight) * kept
    direction = residual
    power = residual.square().sum(1, keepdim=True)
    for _ in range(STEPS):
        image = through(direction) * kept
        step = _ratio(power, (direction * image).sum(1, keepdim=True))
        weight = weight + step * direction
        residual = residual - step * image
        last_power, power = power, residual.square().sum(1, keepdim=True)
        direction = residual + _ratio(power, last_power) * direction
    return weight


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide; 0 where the denominator is not positive, because the row has converged."""
    return torch.where(denominator > 0, numerator / denominator, 0)

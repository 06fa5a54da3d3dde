"""Solve the kept weights again, with the set of kept weights fixed."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 10
"""Measured on three models: 5 steps give up to 4 % more KL, 20 and 40 steps change it by less than 1 %."""


def conjugate_gradient(weight: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor) -> Tensor:
    """Lower ``(w - goal) H (w - goal)^T`` for each row w over its kept weights, by conjugate gradients.

    All rows advance together, each by its own exact line search. With a Hessian of unit diagonal this is the
    Jacobi-preconditioned method.

    Args:
        weight: [N, K] float, the start, zero outside `kept`.
        kept: [N, K] bool.
        hessian: [K, K] float, positive definite.
        goal: [N, K] float, the best weight if all were kept.
    Returns:
        [N, K] float, zero outside `kept`.
    """
    residual = ((goal - weight) @ hessian) * kept
    direction = residual
    power = residual.square().sum(1, keepdim=True)
    for _ in range(STEPS):
        image = (direction @ hessian) * kept
        step = _ratio(power, (direction * image).sum(1, keepdim=True))
        weight = weight + step * direction
        residual = residual - step * image
        last_power, power = power, residual.square().sum(1, keepdim=True)
        direction = residual + _ratio(power, last_power) * direction
    return weight


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide; 0 where `below` is not positive, that is where a row has converged."""
    return torch.where(below > 0, above / below, 0)

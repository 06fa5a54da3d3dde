"""Solve the kept weights again, with the set of kept weights fixed."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 10


def conjugate_gradient(weight: Tensor, kept: Tensor, hessian: Tensor, cross: Tensor) -> Tensor:
    """Lower ``w H w^T - 2 w c^T`` for each row w over its kept weights, by conjugate gradients.

    All rows advance together, each with its own exact step length. On a Hessian of unit diagonal this is the
    Jacobi-preconditioned method.

    Args:
        weight: [N, K] float32, the start, zero outside `kept`.
        kept: [N, K] bool.
        hessian: [K, K] float32, positive semi-definite.
        cross: [N, K] float32.
    Returns:
        [N, K] float32, zero outside `kept`.
    """
    solution = weight
    residual = (cross - weight @ hessian) * kept
    direction = residual
    power = residual.square().sum(1, keepdim=True)
    for _ in range(STEPS):
        image = direction @ hessian
        step = _ratio(power, (direction * image).sum(1, keepdim=True))
        solution = solution + step * direction
        residual = residual - step * (image * kept)
        next_power = residual.square().sum(1, keepdim=True)
        direction = residual + _ratio(next_power, power) * direction
        power = next_power
    return solution


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide, with 0 where a row has converged or its direction has no curvature."""
    return torch.where(below > 0, above / below.clamp_min(torch.finfo(below.dtype).tiny), 0)

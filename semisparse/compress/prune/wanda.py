"""Wanda: keep the weights with the largest |w| times the norm of their input feature, change none."""

from __future__ import annotations

from torch import Tensor

from semisparse.patterns import Pattern


def wanda(weight: Tensor, pattern: Pattern, hessian: Tensor) -> Tensor:
    """Zero the weights with the smallest |w_ij| ||x_j||.

    Args:
        weight: [N, K] float.
        pattern: that the result obeys.
        hessian: [K, K] float32, mean of x x^T over the calibration tokens.
    Returns:
        [N, K], the pruned weight.
    """
    return weight.masked_fill(~pattern.mask(weight.abs() * hessian.diagonal().sqrt()), 0)

"""The inverse of a Hessian as a triangular factor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class InverseFactor(NamedTuple):
    """The inverse of a Hessian H, as a triangular factor.

    Args:
        upper: [K, K] float32, upper triangular U with ``(H + damping I)^-1 = U^T U``. ``U[i, i]^2`` is the first
            diagonal entry of the inverse of ``(H + damping I)[i:, i:]``.
        damping: added to the diagonal.
        outcome: how the factorisation succeeded, for the report.
    """

    upper: Tensor
    damping: float
    outcome: str


def factorise(hessian: Tensor, damping: float) -> InverseFactor | None:
    """Factorise the inverse of a normalised Hessian.

    Its diagonal is 1, or 0 for inputs that are always zero; for ``sparsegpt-published`` its mean is 1.

    If it is singular, try more damping, then float64.

    Args:
        hessian: [K, K] float32.
        damping: added to the diagonal in the first attempt.
    Returns:
        The factor; None if every attempt fails.
    """
    attempts = [
        (torch.float32, damping, "sparsegpt"),
        (torch.float32, 10 * damping, f"sparsegpt damping {10 * damping:g}"),
        (torch.float32, 100 * damping, f"sparsegpt damping {100 * damping:g}"),
        (torch.float64, damping, "sparsegpt fp64"),
    ]
    for dtype, added, outcome in attempts:
        upper = _inverse_factor(hessian.to(dtype), added)
        if upper is not None:
            return InverseFactor(upper.float(), added, outcome)
    return None


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Return U of `InverseFactor`: a Cholesky factorisation in reverse column order gives H = R R^T, and U = R^-1."""
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex((hessian + damping * identity).flip(0, 1))
    if failed:
        return None
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return upper if upper.isfinite().all() else None

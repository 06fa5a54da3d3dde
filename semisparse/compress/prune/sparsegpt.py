"""SparseGPT: prune column after column and let the later columns make up for each loss."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.patterns import NM, Group, Pattern, VectorNM

BLOCK = 128
EXP = {"pinned": False, "joint": False}


def inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Factor (H + damping I)^-1 = U^T U, U upper triangular; None if H is not positive definite."""
    damped = hessian + damping * torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if failed or not lower.isfinite().all():
        return None
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)


def loss_order(weight: Tensor, factor: Tensor, pattern: Pattern) -> Tensor:
    """Order columns by whole windows, the window that would lose most first; a short last window stays last."""
    scores = weight.square() / factor.square().sum(0)
    lost = scores.masked_fill(pattern.mask(scores), 0).sum(0)
    columns = torch.arange(len(lost), device=lost.device)
    whole = len(lost) - len(lost) % pattern.step
    by_window = lost[:whole].unflatten(0, (-1, pattern.step)).sum(1).argsort(descending=True, stable=True)
    return torch.cat((columns[:whole].unflatten(0, (-1, pattern.step))[by_window].flatten(), columns[whole:]))


def prune_columns(weight: Tensor, factor: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    weight = weight.clone()
    kept = torch.zeros_like(weight, dtype=torch.bool)
    features = weight.shape[1]
    block = -(-BLOCK // pattern.step) * pattern.step
    width = pattern.step if isinstance(pattern, NM | VectorNM) else block
    for start in range(0, features, block):
        end = min(start + block, features)
        errors = torch.zeros_like(weight[:, start:end])
        for i in range(start, end):
            if (i - start) % width == 0:
                stop = min(i + width, end)
                if EXP["pinned"] and not isinstance(pattern, NM | VectorNM):
                    scores = saliency(weight, factor, pattern)
                    scores[:, :i] = kept[:, :i].float() * 1e30
                    kept[:, i:stop] = pattern.mask(scores)[:, i:stop]
                else:
                    kept[:, i:stop] = pattern.mask(saliency(weight[:, i:stop], factor[i:stop, i:stop], pattern))
            column = weight[:, i]
            error = torch.where(kept[:, i], 0, column) / factor[i, i]
            weight[:, i:end] -= torch.outer(error, factor[i, i:end])
            errors[:, i - start] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    return weight * kept, kept


def saliency(weight, factor, pattern):
    if EXP["joint"] and isinstance(pattern, Group):
        out = torch.empty_like(weight)
        for s in range(0, weight.shape[1], pattern.size):
            e = s + pattern.size
            u = factor[s:e, s:e]
            out[:, s:e] = torch.linalg.solve_triangular(u, weight[:, s:e], upper=True, left=False).square()
        return out
    return weight.square() / factor.diagonal().square()

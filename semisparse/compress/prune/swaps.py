"""Exchange kept and pruned weights within the windows of an n:m pattern, by the exact cost of each exchange."""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 4
"""Passes over all windows. On babyllama-1m 16 give the same KL."""

ROWS = 4096
"""Rows at a time: an exchange of any two weights of a window is a number per row, 4,096 for 64 columns."""


def swap_weights(
    weight: Tensor, kept: Tensor, hessian: Tensor, goal: Tensor, order: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Lower ``(w - goal) H (w - goal)^T`` by exchanging a kept weight for a pruned one of its window, while that helps.

    In each window in turn every row makes its best exchange, if it has one: the pruned weight gets its best value, all
    other kept weights stay. An exchange's cost is exact.

    Args:
        weight: [N, K] float, zero where not kept.
        kept: [N, K] bool, the mask.
        hessian: [K, K] float, positive definite.
        goal: [N, K] float, the weight that minimises the layer's output error if nothing is pruned.
        order: [K] int64, the weight's own column of each column of these matrices.
        window: columns per window, of the weight's own columns.
    Returns:
        The weight and the mask; each window keeps as many weights as before.
    """
    windows = order.argsort().split(window)
    slope = (weight - goal) @ hessian
    parts = [
        _swap_rows(weight[rows], kept[rows], slope[rows], hessian, windows)  # indexing copies
        for rows in torch.arange(len(weight), device=weight.device).split(ROWS)
    ]
    weights, masks = zip(*parts, strict=True)
    return torch.cat(weights), torch.cat(masks)


def _swap_rows(
    weight: Tensor, kept: Tensor, slope: Tensor, hessian: Tensor, windows: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Exchange weights in place; ``slope`` [N, K] is (w - goal) H, half of the loss's gradient."""
    diagonal = hessian.diagonal()
    for _ in range(SWEEPS):
        improved = False
        for columns in windows:
            change, value = _exchanges(
                weight[:, columns], kept[:, columns], slope[:, columns], hessian[columns][:, columns]
            )
            best, at = change.flatten(1).min(1)
            # Below what float32 can tell from 0, rows would exchange two weights back and forth.
            rows = (best < -1e-6 * diagonal[columns].mean() * weight.square().mean()).nonzero()[:, 0]
            if not len(rows):
                continue
            improved = True
            out, into = at[rows] // len(columns), at[rows] % len(columns)
            added = value[rows, out, into]
            out, into = columns[out], columns[into]
            slope[rows] += added[:, None] * hessian[into] - weight[rows, out][:, None] * hessian[out]
            weight[rows, out], kept[rows, out] = 0, False
            weight[rows, into], kept[rows, into] = added, True
        if not improved:
            break
    return weight, kept


def _exchanges(weight: Tensor, kept: Tensor, slope: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Return how each exchange in a window changes the loss, and the pruned weight's new value, [N, out, into] each."""
    diagonal = hessian.diagonal()
    without = slope[:, None, :] - weight[:, :, None] * hessian  # the slope at `into` once `out` is zero
    removing = (weight.square() * diagonal - 2 * weight * slope)[:, :, None]
    change = removing - without.square() / diagonal
    allowed = kept[:, :, None] & ~kept[:, None, :]
    return change.masked_fill(~allowed, torch.inf), -without / diagonal

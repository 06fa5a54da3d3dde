"""SparseGPT: prune column after column, and let the later columns make up for each loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.compress.prune.rounding import Rounding
from semisparse.patterns import Group, Pattern, Unstructured

BLOCK = 128
"""Columns whose effect on the later ones is applied in one product."""

SHARED_COLUMNS = 16
"""Columns decided at once where a share of a whole matrix is dropped. The later, the more is known: on three models 16
columns instead of 128 take 1 to 8 % off the KL at 50 %, 4 to 15 % at 70 %; 8 and 32 are within 1 % of 16."""

SHARED_COLUMNS_BY_ROW = 128
"""The same where a share of each row is dropped: a row needs columns to choose from, 16 cost 14 to 18 % of KL."""

DECISIONS = 16
"""Times that a window is decided: as its first columns are pruned, the rest of it is chosen anew, by the weights that
have made up for the loss so far. Against once, KL of babyllama-1m at 2:4 / 32:64: .570 / .251 for .605 / .332."""

WIDE = 16
"""Columns from which on those of a window are pruned in the order of their loss, not as they come: KL of babyllama-1m,
pycode-11m and stories260k is 6, 1 and 5 % lower for it with windows of 64, 4 % lower to 1 % higher with windows of 8, 1
to 2 % higher with windows of 4."""


class Factor(NamedTuple):
    """A Hessian's inverse in triangular form.

    Args:
        upper: [K, K] float32, upper triangular U with ``(H + damping I)^-1 = U^T U``. ``U[i, i]^2`` is entry (i, i)
            of the inverse of the Hessian of the columns from i on.
        damping: what was added to the diagonal.
        outcome: how it was found, for the report.
    """

    upper: Tensor
    damping: float
    outcome: str


def factorise(hessian: Tensor, damping: float) -> Factor | None:
    """Factor the inverse of a Hessian of unit diagonal: with more damping, then in float64, where it is singular.

    Args:
        hessian: [K, K] float32.
        damping: added to the diagonal at first.
    Returns:
        the factor, or None if the Hessian is too indefinite for all of them.
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
            return Factor(upper.float(), added, outcome)
    return None


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """Cholesky from the last column to the first gives H = R R^T with R upper triangular, so U is R^-1."""
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex((hessian + damping * identity).flip(0, 1))
    if failed:
        return None
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return upper if upper.isfinite().all() else None


def order_by_loss(weight: Tensor, factor: Factor, pattern: Pattern, windows: bool) -> Tensor:
    """Order the columns so that those that would lose most by pruning have the most columns left to make up for them.

    Each window stays whole, and a short last one last; the columns of windows below `WIDE` stay as they come.

    Args:
        weight: [N, K] float32.
        factor: of its Hessian.
        pattern: whose windows they are.
        windows: whether the windows are ordered, too; else they stay as they come.
    Returns:
        [K] int64, the columns in the order to prune them.
    """
    scores = weight.square() / factor.upper.square().sum(0)
    loss = scores.masked_fill(pattern.mask(scores), 0).sum(0)
    columns = torch.arange(len(loss), device=loss.device)
    if pattern.step >= WIDE and not isinstance(pattern, Group):  # a group goes as one
        columns = loss.argsort(descending=True, stable=True)
        columns = columns[(columns // pattern.step).argsort(stable=True)]
    if not windows:
        return columns
    whole = len(loss) - len(loss) % pattern.step
    by_window = columns[:whole].unflatten(0, (whole // pattern.step, pattern.step))
    worst_first = loss[by_window].sum(1).argsort(descending=True, stable=True)
    return torch.cat((by_window[worst_first].flatten(), columns[whole:]))


def prune_columns(
    weight: Tensor, upper: Tensor, pattern: Pattern, rounding: Rounding | None = None
) -> tuple[Tensor, Tensor]:
    """Prune from the first column to the last, each loss made up for by the columns after it (SparseGPT, algorithm 1).

    Args:
        weight: [N, K] float32.
        upper: [K, K] float32, as in `Factor`.
        rounding: of what is kept: then what a weight loses by pruning and by rounding is one loss.
    Returns:
        [N, K] float32, the pruned weight; [N, K] bool, the weights kept.
    """
    kept = torch.zeros_like(weight, dtype=torch.bool)
    together = _decided_together(pattern)
    block = -(-BLOCK // together) * together
    whole = pattern.size if isinstance(pattern, Group) else 1
    again = max(1, together // DECISIONS // whole) * whole

    def settle(working: Tensor, i: int, stop: int) -> Tensor:
        first = i - i % together
        if (i - first) % again == 0:
            chosen = slice(first, min(first + together, stop))
            scores = (working[:, chosen] / upper.diagonal()[chosen]).square()
            scores[:, : i - first] = torch.where(kept[:, first:i], torch.inf, -1)  # what is done is done
            kept[:, chosen] = _choose(scores, pattern, first)
        return _round_kept(working, kept, i, rounding)

    return _sweep(weight, upper, block, settle), kept


def round_columns(weight: Tensor, kept: Tensor, upper: Tensor, rounding: Rounding) -> Tensor:
    """Round from the first column to the last, each loss made up for by the columns after it, and keep the zeros.

    Args:
        weight: [N, K] float32, zero outside `kept`.
        kept: [N, K] bool.
        upper: [K, K] float32, as in `Factor`.
        rounding: of what is kept.
    Returns:
        [N, K] float32.
    """
    return _sweep(weight, upper, BLOCK, lambda working, i, _: _round_kept(working, kept, i, rounding))


def _round_kept(weight: Tensor, kept: Tensor, i: int, rounding: Rounding | None) -> Tensor:
    """Give column i as it will stay."""
    column = weight[:, i] if rounding is None else rounding.round(weight, kept, i)
    return column.masked_fill(~kept[:, i], 0)


def _sweep(weight: Tensor, upper: Tensor, block: int, settle: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Settle each column in turn, given (weight so far, column, end of its block), the later ones making up for it."""
    weight = weight.clone()
    columns = weight.shape[1]
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        losses = torch.zeros_like(weight[:, start:stop])
        for i in range(start, stop):
            settled = settle(weight, i, stop)
            loss = (weight[:, i] - settled) / upper[i, i]
            weight[:, i + 1 : stop] -= torch.outer(loss, upper[i, i + 1 : stop])
            weight[:, i] = settled
            losses[:, i - start] = loss
        weight[:, stop:] -= losses @ upper[start:stop, stop:]
    return weight


def _decided_together(pattern: Pattern) -> int:
    """Columns whose mask is chosen at once: a window, or enough windows to spread a share over."""
    if not isinstance(pattern, Unstructured | Group):
        return pattern.step
    columns = SHARED_COLUMNS_BY_ROW if pattern.by_row else SHARED_COLUMNS
    return -(-columns // pattern.step) * pattern.step


def _choose(scores: Tensor, pattern: Pattern, start: int) -> Tensor:
    """Choose the weights to keep among columns of which `start` is the first.

    A share is rounded so that the blocks of columns together drop as much as the whole matrix should.

    Args:
        scores: [N, columns] float32.
    Returns:
        [N, columns] bool.
    """
    if not isinstance(pattern, Unstructured | Group):
        return pattern.mask(scores)
    rows, columns = scores.shape
    lines = 1 if pattern.by_row else rows

    def items(first_columns: int) -> int:
        return lines * -(-first_columns // pattern.step)

    def dropped(first_columns: int) -> int:
        return round(items(first_columns) * pattern.percent / 100)

    share = (dropped(start + columns) - dropped(start)) / (items(start + columns) - items(start))
    if share == 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    return replace(pattern, percent=100 * share).mask(scores)

"""The order in which SparseGPT prunes columns: those whose loss is largest first."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.compress.prune.factor import InverseFactor
from semisparse.patterns import Group, Pattern

MIN_REORDERED_WINDOW = 16
"""In windows of this size and more, but not in groups, columns are pruned in the order of their loss. With windows of
64 this order lowers the KL of babyllama-1m, pycode-11m and stories260k by 6, 1 and 5 %. Windows of 8 change it by -4 to
+1 %, windows of 4 by +1 to +2 %."""


def losses(weight: Tensor, factor: InverseFactor, pattern: Pattern) -> Tensor:
    """Return the loss of each column if a weight [N, K] is pruned without compensation, [K] float32, summed over N.

    Args:
        weight: [N, K] float32.
        factor: of its Hessian's inverse.
        pattern: to prune to.
    """
    scores = weight.square() / factor.upper.square().sum(0)
    return scores.masked_fill(pattern.mask(scores), 0).sum(0)


def order_by_loss(loss: Tensor, pattern: Pattern, windows: bool) -> Tensor:
    """Return the order in which to prune the columns: those with the largest loss first.

    The earlier a column is pruned, the more columns are left to compensate its loss. Windows stay whole, and a short
    last window stays last.

    Args:
        loss: of each column, [K] float32.
        pattern: that gives the windows. Within a window, columns are ordered if it has `MIN_REORDERED_WINDOW` or more;
            within a group they are not.
        windows: whether the windows are ordered, too.
    Returns:
        [K] int64, column indices.
    """
    columns = torch.arange(len(loss), device=loss.device)
    if pattern.step >= MIN_REORDERED_WINDOW and not isinstance(pattern, Group):  # a group is pruned as a whole
        columns = loss.argsort(descending=True, stable=True)
        columns = columns[(columns // pattern.step).argsort(stable=True)]
    if not windows:
        return columns
    whole = len(loss) - len(loss) % pattern.step
    by_window = columns[:whole].unflatten(0, (whole // pattern.step, pattern.step))
    worst_first = loss[by_window].sum(1).argsort(descending=True, stable=True)
    return torch.cat((by_window[worst_first].flatten(), columns[whole:]))

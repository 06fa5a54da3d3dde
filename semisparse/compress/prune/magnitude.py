"""Magnitude pruning: keep the largest weights, change none."""

from __future__ import annotations

from torch import Tensor

from semisparse.patterns import Pattern


def magnitude(weight: Tensor, pattern: Pattern) -> Tensor:
    """Zero the weights with the smallest |w|.

    Args:
        weight: [N, K] float.
        pattern: that the result obeys.
    Returns:
        [N, K], the pruned weight.
    """
    return weight.masked_fill(~pattern.mask(weight.abs()), 0)

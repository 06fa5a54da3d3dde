"""Which weights a window or strip keeps, and how often that is decided while SparseGPT prunes its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from semisparse.patterns import Group, Pattern, Unstructured
from semisparse.patterns.base import blocks_along

MASK_COLUMNS = 16
"""Columns whose mask is chosen together, for patterns that prune a fraction of the matrix (SparseGPT's mask selection
block size). A later choice sees more of the compensation: on three models, 16 columns instead of 128 lower the KL by 1
to 8 % at 50 %, by 4 to 15 % at 70 %; 8 and 32 are within 1 % of 16."""

MASK_COLUMNS_BY_ROW = 128
"""`MASK_COLUMNS` for patterns that prune a fraction of each row: with 16 columns a row has too few to choose from, and
the KL is 14 to 18 % higher."""

SAMPLED_ROWS = 256
"""Maximum rows from which `Shares` estimates the threshold of a pattern that prunes a fraction of the matrix, once per
strip (`mask_columns`)."""

MASK_UPDATES = 16
"""A window or strip has C columns. After every ``C // MASK_UPDATES`` of them the mask of the others is chosen anew from
the compensated weights. That number is rounded down to whole groups, but is at least one column or group. KL of
babyllama-1m at 2:4 / 32:64, columns from left to right: .574 / .251; mask chosen once: .601 / .328
(docs/experiments/pruning.md)."""


class MaskRule(NamedTuple):
    """How masks are chosen.

    Args:
        updates: how often the mask of a window or strip is chosen, as in `MASK_UPDATES`.
        strip: columns whose mask is chosen together, for patterns that prune a fraction of the matrix; rounded up to
            whole groups.
        one_threshold: whether one threshold on the scores of all columns decides how many weights such a pattern prunes
            in each strip (`Shares`); else every strip loses the same fraction.
        literal: whether a weight's saliency is GQSA's equation 4 read literally, ``w^2 / [H^-1]_mm^2`` with the whole
            H. Otherwise it is the loss of pruning the weight, ``w^2 / [H^-1]_mm`` with the H of the columns from m on.
    """

    updates: int = MASK_UPDATES
    strip: int = MASK_COLUMNS
    one_threshold: bool = True
    literal: bool = False


REPEATED = MaskRule()
"""Repeated masks, the default."""

PUBLISHED = MaskRule(updates=1, strip=128, one_threshold=False)
"""SparseGPT as published: the mask of a window, or of a block of 128 columns, is chosen once, at its first column."""

EQUATION_4 = MaskRule(literal=True)
"""Repeated masks by GQSA's equation 4."""


def over_matrix(pattern: Pattern) -> TypeGuard[Unstructured | Group]:
    """Return whether the pattern prunes a fraction of the whole matrix."""
    return isinstance(pattern, Unstructured | Group) and not pattern.by_row


class Shares:
    """How many weights, or groups, each strip of columns loses, if a pattern prunes a fraction of the whole matrix.

    Before each strip a threshold is chosen such that, over all columns that are not final, as many scores are below it
    as weights are left to prune. The strip loses as many weights as it has at or below the threshold; the mask
    chooses which. If each strip lost the same fraction instead, a strip of important columns would lose as much as any.

    Args:
        pattern: of the whole matrix.
        shape: [N, K] of the weight.
        strip: columns whose mask is chosen together.
    """

    def __init__(self, pattern: Unstructured | Group, shape: Sequence[int], strip: int) -> None:
        self._pattern, self._groups = pattern, strip // pattern.step
        self._left = round(shape[0] * -(-shape[1] // pattern.step) * pattern.percent / 100)
        self._fraction = 0.0

    def next_strip(self, weight: Tensor, inverse: Tensor) -> None:
        """Decide how many weights, or groups, the next strip loses, of all that are left to prune.

        Args:
            weight: [N, columns that are not final] float32; the strip's columns come first.
            inverse: [these columns] float32, by which squared weights are divided: the diagonal of the inverse of these
                columns' Hessian; with `MaskRule.literal` the squares of these columns' entries of the diagonal of the
                whole Hessian's inverse.
        """
        columns = self._groups * self._pattern.step
        strip = self._saliency(weight[:, :columns], inverse[:columns])
        sample = self._saliency(weight[:: -(-len(weight) // SAMPLED_ROWS)], inverse)
        items = len(weight) * sample.shape[1]
        rank = round(sample.numel() * self._left / items)
        lost = int((strip <= sample.flatten().kthvalue(rank).values).sum()) if rank else 0
        lost = min(max(lost, self._left - (items - strip.numel())), self._left, strip.numel())
        self._left -= lost
        self._fraction = lost / strip.numel()

    def _saliency(self, weight: Tensor, inverse: Tensor) -> Tensor:
        """Return the mean of ``weight^2 / inverse`` over each group, [rows, groups]."""
        losses = blocks_along(weight.square() / inverse, self._pattern.step, dim=1)
        return losses.sum(-1) / blocks_along(torch.ones_like(inverse)[None], self._pattern.step, dim=1).sum(-1)

    def mask(self, scores: Tensor) -> Tensor:
        """Choose the weights of the strip to keep: [N, columns] bool."""
        if self._fraction == 1:
            return torch.zeros_like(scores, dtype=torch.bool)
        return replace(self._pattern, percent=100 * self._fraction).mask(scores)


def mask_columns(pattern: Pattern, rule: MaskRule) -> int:
    """Return how many columns' mask is chosen together: a window's, or for patterns that prune a fraction a strip's.

    A strip has `MASK_COLUMNS_BY_ROW` or `MaskRule.strip` columns, rounded up to whole groups.
    """
    if not isinstance(pattern, Unstructured | Group):
        return pattern.step
    columns = MASK_COLUMNS_BY_ROW if pattern.by_row else rule.strip
    return -(-columns // pattern.step) * pattern.step


def choose_mask(scores: Tensor, pattern: Pattern, start: int) -> Tensor:
    """Choose the weights to keep in a window or strip.

    If the pattern prunes a fraction, take the rounded number of columns that it prunes up to the strip's end, and up to
    its start. The strip prunes their difference, on average per row.

    Args:
        scores: saliency, [N, columns] float32.
        pattern: of the whole matrix.
        start: the first column of the window or strip.
    Returns:
        [N, columns] bool.
    """
    if not isinstance(pattern, Unstructured | Group):
        return pattern.mask(scores)
    columns = scores.shape[1]

    def items(end: int) -> int:
        return -(-end // pattern.step)

    def dropped(end: int) -> int:
        return round(items(end) * pattern.percent / 100)

    fraction = (dropped(start + columns) - dropped(start)) / (items(start + columns) - items(start))
    if fraction == 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    return replace(pattern, percent=100 * fraction).mask(scores)

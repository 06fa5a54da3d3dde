"""SparseGPT: prune one column after another, and let the later columns compensate each loss.

By default masks are chosen repeatedly, which the published algorithm does not do; `PUBLISHED` has its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from semisparse.compress.prune.quantise import ColumnQuantiser, has_rounding_kernel
from semisparse.patterns import NM, Group, Pattern, Unstructured
from semisparse.patterns.base import blocks_along
from semisparse.quant.group import GroupScales

UPDATE_COLUMNS = 128
"""Columns whose effect on the columns after them is applied in one matmul (lazy batch updates); rounded up to whole
windows or strips."""

MASK_COLUMNS = 16
"""Columns whose mask is chosen together, for patterns that prune a fraction of the matrix (SparseGPT's mask selection
block size). A later choice sees more of the compensation: on three models, 16 columns instead of 128 lower the KL by 1
to 8 % at 50 %, by 4 to 15 % at 70 %; 8 and 32 are within 1 % of 16."""

MASK_COLUMNS_BY_ROW = 128
"""`MASK_COLUMNS` for patterns that prune a fraction of each row: with 16 columns a row has too few to choose from, and
the KL is 14 to 18 % higher."""

SAMPLED_ROWS = 256
"""Maximum rows from which `_Shares` estimates the threshold of a pattern that prunes a fraction of the matrix, once per
strip (`_mask_columns`)."""

MASK_UPDATES = 16
"""A window or strip has C columns. After every ``C // MASK_UPDATES`` of them the mask of the others is chosen anew from
the compensated weights. That number is rounded down to whole groups, but is at least one column or group. KL of
babyllama-1m at 2:4 / 32:64, columns from left to right: .574 / .251; mask chosen once: .601 / .328
(docs/experiments/pruning.md)."""

MIN_REORDERED_WINDOW = 16
"""In windows of this size and more, but not in groups, columns are pruned in the order of their loss. With windows of
64 this order lowers the KL of babyllama-1m, pycode-11m and stories260k by 6, 1 and 5 %. Windows of 8 change it by -4 to
+1 %, windows of 4 by +1 to +2 %."""


class MaskRule(NamedTuple):
    """How masks are chosen.

    Args:
        updates: how often the mask of a window or strip is chosen, as in `MASK_UPDATES`.
        strip: columns whose mask is chosen together, for patterns that prune a fraction of the matrix; rounded up to
            whole groups.
        one_threshold: whether one threshold on the scores of all columns decides how many weights such a pattern prunes
            in each strip (`_Shares`); else every strip loses the same fraction.
        literal: whether a weight's saliency is GQSA's equation 4 read literally, ``w^2 / [H^-1]_mm^2`` with the whole
            H. Otherwise it is the loss of pruning the weight, ``w^2 / [H^-1]_mm`` with the H of the columns from m on.
    """

    updates: int = MASK_UPDATES
    strip: int = MASK_COLUMNS
    one_threshold: bool = True
    literal: bool = False


REPEATED = MaskRule()
"""Repeated masks, the default."""

PUBLISHED = MaskRule(updates=1, strip=UPDATE_COLUMNS, one_threshold=False)
"""SparseGPT as published: the mask of a window, or of a block of 128 columns, is chosen once, at its first column."""

EQUATION_4 = MaskRule(literal=True)
"""Repeated masks by GQSA's equation 4."""


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


def prune_columns(
    weight: Tensor,
    upper: Tensor,
    pattern: Pattern,
    quantiser: ColumnQuantiser | None = None,
    rule: MaskRule = REPEATED,
    pieces: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Prune columns from left to right; the columns after each compensate its loss (SparseGPT, algorithm 1).

    Args:
        weight: [N, K] float32.
        upper: [K, K] float32, as in `InverseFactor`.
        pattern: that the result obeys.
        quantiser: of the kept weights; the loss of pruning and of quantising is then compensated together.
        rule: how the mask is chosen.
        pieces: numbers of rows that each matmul has, for a pattern that prunes every row by itself; None for all rows.
    Returns:
        The pruned weight, [N, K] float32; the mask of kept weights, [N, K] bool.
    """
    if quantiser is None and not rule.literal and has_pruning_kernel(pattern, weight):
        from semisparse.compress.prune.sweep_triton import prune_windows

        interval = max(1, pattern.window // rule.updates)
        return prune_windows(weight, upper, pattern.keep, pattern.window, interval, UPDATE_COLUMNS, pieces)
    if pieces is not None:
        pairs = [prune_columns(piece, upper, pattern, quantiser, rule) for piece in weight.split(list(pieces))]
        pruned, masks = zip(*pairs, strict=True)
        return torch.cat(pruned), torch.cat(masks)
    kept = torch.zeros_like(weight, dtype=torch.bool)
    mask_columns = _mask_columns(pattern, rule)
    update_columns = -(-UPDATE_COLUMNS // mask_columns) * mask_columns
    group = pattern.size if isinstance(pattern, Group) else 1
    interval = max(1, mask_columns // rule.updates // group) * group
    shares = _Shares(pattern, weight.shape, mask_columns) if rule.one_threshold and _over_matrix(pattern) else None
    # Entry i: if literal, diagonal entry i of the whole Hessian's inverse; else the square root of the first diagonal
    # entry of the inverse of H[i:, i:].
    divisor = upper.square().sum(0) if rule.literal else upper.diagonal()

    def prune_column(working: Tensor, i: int, stop: int) -> Tensor:
        first = i - i % mask_columns
        if shares and i == first:
            # If not literal, the diagonal of the inverse of H[i:, i:]: each column from i on is scored as if it were
            # pruned next, with all others from i on to compensate its loss.
            inverse = divisor[i:].square() if rule.literal else upper[i:, i:].square().sum(0)
            shares.next_strip(working[:, i:], inverse)
        if (i - first) % interval == 0:
            chosen = slice(first, min(first + mask_columns, stop))
            scores = (working[:, chosen] / divisor[chosen]).square()
            scores[:, : i - first] = torch.where(kept[:, first:i], torch.inf, -1)  # columns before i are final
            kept[:, chosen] = shares.mask(scores) if shares else _choose_mask(scores, pattern, first)
        return _final_column(working, kept, i, quantiser)

    return _compensate(weight, upper, update_columns, prune_column), kept


def has_pruning_kernel(pattern: Pattern, weight: Tensor) -> TypeGuard[NM]:
    """Return whether `sweep_triton` can prune a weight to a pattern, not quantised, by a rule that is not literal.

    It can on a GPU with Triton, for N:M patterns whose window is a power of two from 2 to `UPDATE_COLUMNS` and divides
    K.
    """
    if not (weight.is_cuda and isinstance(pattern, NM) and find_spec("triton")):
        return False
    window = pattern.window
    return 1 < window <= UPDATE_COLUMNS and window.bit_count() == 1 and weight.shape[1] % window == 0


def _over_matrix(pattern: Pattern) -> TypeGuard[Unstructured | Group]:
    """Return whether the pattern prunes a fraction of the whole matrix."""
    return isinstance(pattern, Unstructured | Group) and not pattern.by_row


class _Shares:
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


def quantise_columns(
    weight: Tensor,
    kept: Tensor,
    upper: Tensor,
    bits: Sequence[int],
    size: int,
    units: Tensor,
    dtype: torch.dtype,
    importance: Tensor | None = None,
) -> tuple[list[Tensor], list[GroupScales]]:
    """Quantise columns from left to right; the columns after each compensate its loss. Pruned weights stay zero.

    Args:
        weight: [N, K] float32, zero where not kept.
        kept: [N, K] bool, the mask.
        upper: [K, K] float32, as in `InverseFactor`.
        bits: bits per code, one or several numbers. One pass over the columns quantises the weight to each of them.
        size: columns per group.
        units: as in `ColumnQuantiser`, like the arguments below.
        dtype: of the scales.
        importance: of the columns.
    Returns:
        For each number of bits the dequantised weight, [N, K] float32, and the scales.
    """
    quantiser = ColumnQuantiser(bits, size, units, dtype, importance)
    blocks, mask = weight.repeat(len(bits), 1), kept.repeat(len(bits), 1)
    if has_rounding_kernel(weight):
        blocks = quantiser.round_all(blocks, mask, upper)
    else:
        blocks = _compensate(
            blocks, upper, UPDATE_COLUMNS, lambda working, i, _: _final_column(working, mask, i, quantiser)
        )
    return list(blocks.chunk(len(bits))), quantiser.scales


def _final_column(weight: Tensor, kept: Tensor, i: int, quantiser: ColumnQuantiser | None) -> Tensor:
    """Return column i, [N] float32, pruned, and quantised if there is a quantiser."""
    column = weight[:, i] if quantiser is None else quantiser.fake_quantise(weight, kept, i)
    return column.masked_fill(~kept[:, i], 0)


def _compensate(weight: Tensor, upper: Tensor, block: int, finalise: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Finalise one column after another; update the columns after it so that they compensate its change.

    Args:
        weight: [N, K] float32.
        upper: [K, K] float32, as in `InverseFactor`.
        block: columns per block; a block's effect on the columns after it is applied in one matmul.
        finalise: returns the final column ([N] float32), given the weight so far, the column and the end of its block.
    Returns:
        [N, K] float32.
    """
    weight = weight.clone()
    columns = weight.shape[1]
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        losses = torch.zeros_like(weight[:, start:stop])
        for i in range(start, stop):
            final = finalise(weight, i, stop)
            loss = (weight[:, i] - final) / upper[i, i]
            weight[:, i + 1 : stop] -= torch.outer(loss, upper[i, i + 1 : stop])
            weight[:, i] = final
            losses[:, i - start] = loss
        weight[:, stop:] -= losses @ upper[start:stop, stop:]
    return weight


def _mask_columns(pattern: Pattern, rule: MaskRule) -> int:
    """Return how many columns' mask is chosen together: a window's, or for patterns that prune a fraction a strip's.

    A strip has `MASK_COLUMNS_BY_ROW` or `MaskRule.strip` columns, rounded up to whole groups.
    """
    if not isinstance(pattern, Unstructured | Group):
        return pattern.step
    columns = MASK_COLUMNS_BY_ROW if pattern.by_row else rule.strip
    return -(-columns // pattern.step) * pattern.step


def _choose_mask(scores: Tensor, pattern: Pattern, start: int) -> Tensor:
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

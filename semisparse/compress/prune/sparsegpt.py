"""SparseGPT: prune one column after another, and let the later columns compensate each loss.

By default masks are chosen repeatedly, which the published algorithm does not do; `masks.PUBLISHED` has its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TypeGuard

import torch
from torch import Tensor

from semisparse.compress.prune.masks import REPEATED, MaskRule, Shares, choose_mask, mask_columns, over_matrix
from semisparse.compress.prune.quantise import ColumnQuantiser, has_rounding_kernel
from semisparse.patterns import NM, Group, Pattern
from semisparse.quant.group import GroupScales

UPDATE_COLUMNS = 128
"""Columns whose effect on the columns after them is applied in one matmul (lazy batch updates); rounded up to whole
windows or strips."""


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
        upper: [K, K] float32, as in `factor.InverseFactor`.
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
    strip = mask_columns(pattern, rule)
    update_columns = -(-UPDATE_COLUMNS // strip) * strip
    group = pattern.size if isinstance(pattern, Group) else 1
    interval = max(1, strip // rule.updates // group) * group
    shares = Shares(pattern, weight.shape, strip) if rule.one_threshold and over_matrix(pattern) else None
    # Entry i: if literal, diagonal entry i of the whole Hessian's inverse; else the square root of the first diagonal
    # entry of the inverse of H[i:, i:].
    divisor = upper.square().sum(0) if rule.literal else upper.diagonal()

    def prune_column(working: Tensor, i: int, stop: int) -> Tensor:
        first = i - i % strip
        if shares and i == first:
            # If not literal, the diagonal of the inverse of H[i:, i:]: each column from i on is scored as if it were
            # pruned next, with all others from i on to compensate its loss.
            inverse = divisor[i:].square() if rule.literal else upper[i:, i:].square().sum(0)
            shares.next_strip(working[:, i:], inverse)
        if (i - first) % interval == 0:
            chosen = slice(first, min(first + strip, stop))
            scores = (working[:, chosen] / divisor[chosen]).square()
            scores[:, : i - first] = torch.where(kept[:, first:i], torch.inf, -1)  # columns before i are final
            kept[:, chosen] = shares.mask(scores) if shares else choose_mask(scores, pattern, first)
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
        upper: [K, K] float32, as in `factor.InverseFactor`.
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
        upper: [K, K] float32, as in `factor.InverseFactor`.
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

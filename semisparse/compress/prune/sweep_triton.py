"""One lazy batch update of `sparsegpt.prune_columns` (128 columns) as one Triton kernel, for patterns such as 32:64.

In torch a column takes some 20 launches, and the linear layers of a llama2-7b decoder layer have 35,584 columns. Every
operation here rounds as torch's does, so that the mask is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS = 4, 1
"""Rows and warps per program. Columns are pruned one after another; many small programs hide the latency of that."""


@triton.jit
def _keep_highest(scores, columns, keep, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mark the ``keep`` highest scores of each window; of equal scores those in lower columns.

    A key is the score's bits followed by the reversed column index: keys sort in this order, and no two are equal.
    """
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.reshape((bits << 32) + (COLUMNS - columns)[None, :], (ROWS, COLUMNS // WINDOW, WINDOW))
    ordered = tl.sort(keys, descending=True)
    last = tl.arange(0, WINDOW) == keep - 1
    lowest = tl.sum(tl.where(last[None, None, :], ordered, 0), axis=2)
    return tl.reshape(keys >= lowest[:, :, None], (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["keep"])  # a search prunes to any number: each would be compiled, in 1.5 s
def semisparse_prune_windows(
    weight,
    kept,
    losses,
    upper,
    rows,
    columns,
    start,
    stop,
    keep,
    WINDOW: tl.constexpr,
    INTERVAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Prune columns ``start`` to ``stop`` of weight [rows, columns] in place, to ``keep`` of each WINDOW.

    Grid: (ceil(rows / ROWS),). Writes the mask to kept [rows, columns] int8, and each column's loss to losses [rows,
    COLUMNS]. A window's mask is chosen anew before every INTERVAL-th column; ``upper`` is [columns, columns].
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (start + column < stop)[None, :]
    at = row[:, None] * columns + start + column[None, :]
    values = tl.load(weight + at, mask=inside, other=0.0)
    first_of_block = upper + start.to(tl.int64) * (columns + 1)
    in_block = start + column < stop
    diagonal = tl.load(first_of_block + column * (columns + 1), mask=in_block, other=1.0)
    mask = tl.zeros((ROWS, COLUMNS), tl.int32)
    lost = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, stop - start):
        first = i // WINDOW * WINDOW
        if (i - first) % INTERVAL == 0:
            scores = tl.div_rn(values, tl.broadcast_to(diagonal[None, :], (ROWS, COLUMNS)))
            scores = scores * scores
            final = tl.where(mask != 0, float("inf"), -1.0)
            scores = tl.where((column < i)[None, :], final, scores)
            chosen = _keep_highest(scores, column, keep, WINDOW, ROWS, COLUMNS)
            window = (column >= first) & (column < first + WINDOW)
            mask = tl.where(window[None, :], chosen.to(tl.int32), mask)
        here = (column == i)[None, :]
        before = tl.sum(tl.where(here, values, 0.0), axis=1)
        keeps = tl.sum(tl.where(here, mask, 0), axis=1)
        final = tl.where(keeps != 0, before, 0.0)
        factors = tl.load(first_of_block + i * columns + column, mask=in_block, other=0.0)
        own = tl.sum(tl.where(column == i, factors, 0.0), axis=0)
        loss = tl.div_rn(before - final, tl.broadcast_to(own, (ROWS,)))
        values = tl.where((column > i)[None, :], values - loss[:, None] * factors[None, :], values)
        values = tl.where(here, final[:, None], values)
        lost = tl.where(here, loss[:, None], lost)
    tl.store(weight + at, values, mask=inside)
    tl.store(kept + at, mask.to(tl.int8), mask=inside)
    tl.store(losses + row[:, None] * COLUMNS + column[None, :], lost, mask=(row < rows)[:, None])


def prune_windows(
    weight: Tensor,
    upper: Tensor,
    keep: int,
    window: int,
    interval: int,
    block: int,
    pieces: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Prune columns from left to right to ``keep`` of every ``window``, as `sparsegpt.prune_columns` does.

    Args:
        weight: [N, K] float32, on a GPU.
        upper: [K, K] float32, as in `factor.InverseFactor`.
        keep: weights of a window to keep.
        window: columns; a power of two that divides K and ``block``.
        interval: columns after which a window's mask is chosen anew.
        block: columns per lazy update; a power of two.
        pieces: numbers of rows that each matmul has; None for all rows.
    Returns:
        The pruned weight, [N, K] float32; the mask of kept weights, [N, K] bool.
    """
    weight, upper = weight.clone(memory_format=torch.contiguous_format), upper.contiguous()
    rows, columns = weight.shape
    kept = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    losses = torch.empty((rows, block), dtype=torch.float32, device=weight.device)
    parts, lost_parts = ([*matrix.split(list(pieces or [rows]))] for matrix in (weight, losses))
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        with torch.cuda.device_of(weight):  # where Triton launches
            semisparse_prune_windows[(triton.cdiv(rows, ROWS),)](
                weight,
                kept,
                losses,
                upper,
                rows,
                columns,
                start,
                stop,
                keep,
                WINDOW=window,
                INTERVAL=interval,
                ROWS=ROWS,
                COLUMNS=block,
                num_warps=WARPS,
                enable_fp_fusion=False,  # a product is rounded before it is subtracted, as in torch
            )
        for part, lost in zip(parts, lost_parts, strict=True):
            part[:, stop:] -= lost[:, : stop - start] @ upper[start:stop, stop:]
    return weight, kept.bool()

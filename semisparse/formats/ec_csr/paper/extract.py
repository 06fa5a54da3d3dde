"""Hierarchical block extraction: rows that share columns share one list of them (section 4, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Progress = Callable[[int, int], None]
"""Called after each round with (number of weights whose block is final, total number of weights)."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of one granularity: rows that share a list of columns.

    Args:
        rows: [blocks, granularity] int64, the rows of each block.
        columns: [blocks, K] bool, the columns that the rows of a block share.
    """

    rows: Tensor
    columns: Tensor

    @property
    def granularity(self) -> int:
        """Rows per block."""
        return self.rows.shape[1]

    @property
    def weights(self) -> int:
        """Number of weights in all blocks."""
        return self.granularity * int(self.columns.count_nonzero())


def extract(
    stored: Tensor, multiple: int, granularity: int, reach: int, progress: Progress = lambda done, total: None
) -> list[Blocks]:
    """Cut a matrix into blocks as coarse as common columns allow (Algorithm 1). Every device returns the same.

    Args:
        stored: [N, K] bool, the weights to cover.
        multiple: blocks of two or more rows have a multiple of this many columns; the rest stay in finer blocks.
        granularity: maximum rows per block, a power of two; 1 merges no rows.
        reach: maximum distance between neighbouring columns of a block of two rows or more: the largest delta
            (section 6.2). Only blocks from which columns were moved into coarser ones may have wider gaps.
        progress: called after each round.
    Returns:
        One `Blocks` per granularity, ascending; together they cover each stored weight once, and nothing else.
    """
    total = int(stored.count_nonzero())
    members = torch.arange(len(stored), device=stored.device).unsqueeze(1)
    remaining, sets = stored.clone(), []
    while members.shape[1] < granularity:
        rounds = []
        while (extracted := _extract_round(remaining, members, multiple, reach)) is not None:
            rounds.append(extracted)
            progress(total - sum(each.weights for each in rounds), total)
        sets.append(_remaining_blocks(remaining, members))
        if not rounds:
            break
        remaining = torch.cat([each.columns for each in rounds])
        members = torch.cat([each.rows for each in rounds])
    else:
        sets.append(_remaining_blocks(remaining, members))
    progress(total, total)
    return sets


def _remaining_blocks(remaining: Tensor, members: Tensor) -> Blocks:
    """Return the blocks that still have columns.

    Args:
        remaining: [blocks, K] bool, the columns that were not extracted.
        members: [blocks, granularity] int64, the rows of each block.
    """
    rows = remaining.any(1)
    return Blocks(members[rows], remaining[rows])


def _extract_round(remaining: Tensor, members: Tensor, multiple: int, reach: int) -> Blocks | None:
    """Move common columns of paired blocks out of ``remaining`` into coarser blocks; None if no pair shares enough.

    Args:
        remaining: [blocks, K] bool, columns of each block; changed in place.
        members: [blocks, granularity] int64, the rows of each block.
        multiple, reach: as in `extract`.
    """
    first, second = match_rows(count_overlaps(remaining), multiple)
    columns = longest_runs(remaining[first] & remaining[second], reach)
    taken = columns.sum(1, keepdim=True, dtype=torch.int32) // multiple * multiple
    columns &= columns.cumsum(1, dtype=torch.int32) <= taken
    paired = taken.flatten() > 0
    if not paired.any():
        return None
    first, second, columns = first[paired], second[paired], columns[paired]
    for rows in (first, second):
        remaining[rows] = remaining[rows] & ~columns
    return Blocks(torch.cat((members[first], members[second]), 1), columns)


def longest_runs(columns: Tensor, reach: int) -> Tensor:
    """Keep each row's longest run of columns that are at most ``reach`` apart; of equals the first (section 6.2).

    Args:
        columns: [rows, K] bool.
        reach: as in `extract`.
    Returns:
        [rows, K] bool.
    """
    row, column = columns.nonzero(as_tuple=True)
    if not len(row):
        return columns
    begins = (row.diff(prepend=row[:1] - 1) != 0) | (column.diff(prepend=column[:1]) > reach)
    run = begins.cumsum(0) - 1
    length, row_of = run.bincount(), row[begins]
    longest = length.new_zeros(len(columns)).scatter_reduce(0, row_of, length, "amax")
    index = torch.arange(len(length), device=columns.device)
    candidate = torch.where(length == longest[row_of], index, len(length))
    chosen = index.new_full((len(columns),), len(length)).scatter_reduce(0, row_of, candidate, "amin")
    kept = run == chosen[row]
    result = torch.zeros_like(columns)
    result[row[kept], column[kept]] = True
    return result


def count_overlaps(stored: Tensor) -> Tensor:
    """Return how many columns each two rows share: [N, K] bool to [N, N] float32, exact for K below 2**24."""
    ones = stored.float()
    return ones @ ones.T


def match_rows(overlaps: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Pair each row, in order, with the unmatched row that shares the most columns with it (Algorithm 2).

    Args:
        overlaps: [N, N] float32, symmetric, whole numbers; its diagonal is overwritten.
        least: rows that share fewer columns are not paired.
    Returns:
        The first and the second row of each pair, both [pairs] int64. Ties go to the lower row.
    """
    overlaps.fill_diagonal_(-1)
    # Most blocks of two or more rows share too few columns with any other: drop them.
    candidates = (overlaps >= least).any(1).nonzero().squeeze(1)
    overlaps = overlaps[candidates][:, candidates]
    rows = len(candidates)
    index = torch.arange(rows, device=overlaps.device)
    free = torch.ones(rows, dtype=torch.bool, device=overlaps.device)
    partners = torch.full((rows,), -1, device=overlaps.device)
    for row in range(rows - 1):
        shared = torch.where(free, overlaps[row], -1)
        # Not argmax: which of equal values it returns is not defined.
        partner = torch.where(shared == shared.amax(), index, rows).amin()
        paired = free[row] & (shared[partner] >= least)
        partners[row] = torch.where(paired, partner, partners[row])
        free[row] = False
        free[partner] &= ~paired
    first = (partners >= 0).nonzero().squeeze(1)
    return candidates[first], candidates[partners[first]]

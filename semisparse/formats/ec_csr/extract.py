"""Hierarchical block extraction: rows that share columns share one list of them (paper, section 4, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Progress = Callable[[int, int], None]
"""(rounds of extraction done, those begun at least); only the first number is sure."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of one granularity: rows that share a list of columns.

    Args:
        panels: [blocks] int64, the panel that each stands in.
        rows: [blocks, granularity] int64, its rows inside the panel.
        columns: [blocks, K] bool.
    """

    panels: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def granularity(self) -> int:
        """Rows of each block."""
        return self.rows.shape[1]


def extract(stored: Tensor, multiple: int, granularity: int) -> list[Blocks]:
    """Cut every panel into blocks, as coarse as its rows' common columns allow; the same on every device.

    Args:
        stored: [panels, rows, K] bool, the weights to cover. Rows are matched inside their panel.
        multiple: blocks of two rows or more have a multiple of this many columns.
        granularity: the most rows of a block, a power of two; 1 extracts nothing.
    Returns:
        One `Blocks` a granularity, ascending; together they cover each stored weight once, and nothing else.
    """
    panels, rows, _ = stored.shape
    members = torch.arange(rows, device=stored.device).expand(panels, rows).unsqueeze(-1)
    sets = []
    remaining = stored.clone()
    while members.shape[-1] < granularity:
        rounds = []
        while (found := _extract_round(remaining, members, multiple)) is not None:
            rounds.append(found)
        sets.append(_blocks_left(remaining, members))
        if not rounds:
            return sets
        remaining, members = _by_panel(rounds, panels)
    sets.append(_blocks_left(remaining, members))
    return sets


def _extract_round(remaining: Tensor, members: Tensor, multiple: int) -> Blocks | None:
    """Take the common columns of matched rows out of ``remaining``, in place; None if none share enough."""
    partners = match_rows(count_overlaps(remaining), multiple)
    panels, first = (partners > torch.arange(partners.shape[1], device=partners.device)).nonzero(as_tuple=True)
    if not len(panels):
        return None
    second = partners[panels, first]
    columns = remaining[panels, first] & remaining[panels, second]
    taken = columns.sum(1, keepdim=True, dtype=torch.int32) // multiple * multiple
    columns &= columns.cumsum(1, dtype=torch.int32) <= taken
    for rows in (first, second):
        remaining[panels, rows] = remaining[panels, rows] & ~columns
    return Blocks(panels, torch.cat((members[panels, first], members[panels, second]), 1), columns)


def count_overlaps(stored: Tensor) -> Tensor:
    """Count the columns that each two rows of a panel share: [panels, rows, K] bool -> [panels, rows, rows] int64.

    A product of 0 and 1 in float32 is exact below 2**24.
    """
    ones = stored.float()
    return torch.bmm(ones, ones.mT).long()


def match_rows(overlaps: Tensor, least: int) -> Tensor:
    """Pair each row with the free row of its panel that shares most columns with it, in order (Algorithm 2).

    Args:
        overlaps: [panels, rows, rows] int64, symmetric.
        least: rows that share fewer columns are not paired.
    Returns:
        [panels, rows] int64: each row's partner, -1 where it has none. Ties go to the lower row.
    """
    panels, rows, _ = overlaps.shape
    place = torch.arange(rows, device=overlaps.device)
    every = torch.arange(panels, device=overlaps.device)
    # One number orders by overlap, then by place: the maximum is the same on every device.
    keys = overlaps * rows + (rows - 1 - place)
    keys.diagonal(dim1=1, dim2=2).fill_(-1)
    free = torch.ones(panels, rows, dtype=torch.bool, device=overlaps.device)
    partners = torch.full((panels, rows), -1, device=overlaps.device)
    for row in range(rows - 1):
        best, partner = torch.where(free, keys[:, row], -1).max(1)
        paired = free[:, row] & (best >= least * rows)
        partners[:, row] = torch.where(paired, partner, partners[:, row])
        partners[every, partner] = torch.where(paired, row, partners[every, partner])
        free[:, row] = False
        free[every, partner] &= ~paired
    return partners


def _blocks_left(remaining: Tensor, members: Tensor) -> Blocks:
    panels, rows = remaining.any(2).nonzero(as_tuple=True)
    return Blocks(panels, members[panels, rows], remaining[panels, rows])


def _by_panel(rounds: list[Blocks], panels: int) -> tuple[Tensor, Tensor]:
    """Make of each block a row of its panel: [panels, most blocks, K] bool, and their members."""
    place = torch.cat([found.panels for found in rounds])
    order = place.sort(stable=True).indices
    place = place[order]
    counts = place.bincount(minlength=panels)
    rank = torch.arange(len(place), device=place.device) - (counts.cumsum(0) - counts)[place]
    most = int(counts.max())
    columns = torch.cat([found.columns for found in rounds])[order]
    rows = torch.cat([found.rows for found in rounds])[order]
    stored = torch.zeros(panels, most, columns.shape[1], dtype=torch.bool, device=place.device)
    members = torch.zeros(panels, most, rows.shape[1], dtype=rows.dtype, device=place.device)
    stored[place, rank] = columns
    members[place, rank] = rows
    return stored, members

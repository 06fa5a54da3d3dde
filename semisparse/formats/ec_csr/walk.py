"""From blocks to the lists of columns that lanes walk, and from those to tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.formats.ec_csr.extract import Blocks
from semisparse.formats.ec_csr.layout import LANES, vector_of

SHORT_VECTOR = 1
LONG_VECTOR = 4
"""Columns a load in the layout `paper`: of what is left of a row after its long part, and of everything else."""


@dataclass(frozen=True)
class Steps:
    """The columns of some blocks in order, gaps that a delta cannot span filled by padding.

    Args:
        block: [steps] int64, ascending.
        column: [steps] int64, ascending inside a block.
        real: [steps] bool, False for padding.
        counts: [blocks] int64, the steps of each.
    """

    block: Tensor
    column: Tensor
    real: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Bundles:
    """Lists of columns, 32 of equal length to a bundle, of one granularity and vector.

    Args:
        granularity: rows of each block.
        vector: columns that a lane loads at a time.
        panel: [bundles] int64.
        columns: [bundles] int64, columns a lane, a multiple of the vector.
        rows: [bundles, owners, granularity] int64 inside the panel, -1 for none; owners is 32, or 1 if lanes share.
        bundle, lane, step, column, real: [steps] of each step; the steps of a lane follow each other.
    """

    granularity: int
    vector: int
    panel: Tensor
    columns: Tensor
    rows: Tensor
    bundle: Tensor
    lane: Tensor
    step: Tensor
    column: Tensor
    real: Tensor


def steps_of(blocks: Blocks, delta_bits: int) -> Steps:
    """List the columns of blocks; where a gap exceeds the range of a delta, zeros step across it (section 6.2)."""
    block, column = blocks.columns.nonzero(as_tuple=True)
    limit = (1 << delta_bits) - 1
    gap = column.diff(prepend=column[:1])
    gap = torch.where(block.diff(prepend=block[:1] - 1) == 0, gap, 1)
    repeats = 1 + (gap - 1) // limit
    ends = repeats.cumsum(0)
    source = torch.arange(len(column), device=column.device).repeat_interleave(repeats)
    place = torch.arange(len(source), device=column.device) - (ends - repeats)[source]
    real = place == repeats[source] - 1
    stepped = torch.where(real, column[source], (column - gap)[source] + limit * (place + 1))
    counts = torch.zeros(len(blocks.panels), dtype=torch.int64, device=column.device).index_add_(0, block, repeats)
    return Steps(block[source], stepped, real, counts)


def bundles_of_panels(blocks: Blocks, delta_bits: int, clip: Tensor, dtype: torch.dtype) -> list[Bundles]:
    """Give each lane a block of its own, or a part of one.

    Blocks are clipped into parts as near to their panel's ``clip`` ([panels] float) loads as equal parts can be; a
    panel's parts are sorted by length, and every 32 make a bundle.
    """
    if not len(blocks.panels):
        return []
    steps, vector = steps_of(blocks, delta_bits), vector_of(blocks.granularity, dtype)
    loads = -(-steps.counts // vector)
    parts = (loads / clip[blocks.panels]).round().long().clamp(min=1)
    first_part, total = parts.cumsum(0) - parts, int(parts.sum())
    within = _rank(steps.block, steps.counts)
    load = within // vector
    # Part i of a block begins at load i * loads // parts.
    part = first_part[steps.block] + ((load + 1) * parts[steps.block] - 1) // loads[steps.block]
    block = torch.arange(len(parts), device=parts.device).repeat_interleave(parts)
    number = torch.arange(total, device=parts.device) - first_part[block]
    begin = number * loads[block] // parts[block]
    length = (number + 1) * loads[block] // parts[block] - begin
    bundle, lane, panel = _group(blocks.panels[block], length)
    columns = torch.zeros(len(panel), dtype=torch.int64, device=panel.device)
    columns = columns.scatter_reduce_(0, bundle, length, "amax") * vector
    rows = torch.full((len(panel), LANES, blocks.granularity), -1, device=panel.device)
    rows[bundle, lane] = blocks.rows[block]
    step = within - (begin * vector)[part]
    return [
        Bundles(
            blocks.granularity,
            vector,
            panel,
            columns,
            rows,
            bundle[part],
            lane[part],
            step,
            steps.column,
            steps.real,
        )
    ]


def _group(panels: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put parts into bundles by panel and falling length: each part's bundle and lane, and each bundle's panel."""
    key = panels * (1 << 32) - length
    order = key.sort(stable=True).indices
    counts = panels.bincount()
    bundles = -(-counts // LANES)
    first = bundles.cumsum(0) - bundles
    rank = torch.empty_like(order)
    rank[order] = _rank(panels[order], counts)
    panel = torch.arange(len(counts), device=counts.device).repeat_interleave(bundles)
    return first[panels] + rank // LANES, rank % LANES, panel


def bundles_of_paper(blocks: Blocks, delta_bits: int, clip: int) -> list[Bundles]:
    """Give each block to the 32 lanes of a warp, a contiguous part each (sections 6.2 and 6.3).

    A block's long part is a multiple of 32 * 4 columns, clipped to ``clip`` loads a lane; what is left is padded to a
    multiple of 32.
    """
    steps = steps_of(blocks, delta_bits)
    within = _rank(steps.block, steps.counts)
    whole = LANES * LONG_VECTOR
    long = steps.counts // whole * whole
    is_long = within < long[steps.block]
    return [
        made
        for vector, kept, begin, counts in (
            (LONG_VECTOR, is_long, torch.zeros_like(long), long),
            (SHORT_VECTOR, ~is_long, long, steps.counts - long),
        )
        if (made := _shared_bundles(blocks, steps, within, kept, begin, counts, vector, clip)) is not None
    ]


def _shared_bundles(
    blocks: Blocks,
    steps: Steps,
    within: Tensor,
    kept: Tensor,
    begin: Tensor,
    counts: Tensor,
    vector: int,
    clip: int,
) -> Bundles | None:
    """Make bundles whose lanes share their rows of the steps that are ``kept``."""
    if not counts.any():
        return None
    loads = -(-counts // (LANES * vector))
    parts = -(-loads // clip)
    first = parts.cumsum(0) - parts
    block = torch.arange(len(parts), device=parts.device).repeat_interleave(parts)
    number = torch.arange(len(block), device=parts.device) - first[block]
    start = number * loads[block] // parts[block]
    columns = ((number + 1) * loads[block] // parts[block] - start) * vector
    of = steps.block[kept]
    at = (within - begin[steps.block])[kept]
    part = first[of] + ((at // (LANES * vector) + 1) * parts[of] - 1) // loads[of]
    at = at - (start * LANES * vector)[part]
    lane, step = at // columns[part], at % columns[part]
    rows = blocks.rows[block].unsqueeze(1)
    return Bundles(
        blocks.granularity,
        vector,
        blocks.panels[block],
        columns,
        rows,
        part,
        lane,
        step,
        steps.column[kept],
        steps.real[kept],
    )


def _rank(groups: Tensor, counts: Tensor) -> Tensor:
    """Number the members of each group, given sorted groups and how many each has."""
    return torch.arange(len(groups), device=groups.device) - (counts.cumsum(0) - counts)[groups]

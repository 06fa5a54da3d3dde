"""The paper's layout: a warp has a block, rows that share columns; its lanes have a contiguous part of them each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.checks import refuse_first
from semisparse.formats.ec_csr.extract import Blocks
from semisparse.formats.ec_csr.layout import (
    FIRST_OFFSET,
    GRANULARITIES,
    LANES,
    delta_bits_of,
    deltas_at,
    index_bits_for,
    narrowed,
    packed_deltas,
    rank_in_group,
    refuse_repeats,
    widened,
)

LONG_VECTOR, SHORT_VECTOR = 4, 1
"""Columns that a lane loads at a time: of a block, and of what is left of a one-row block (section 6.3)."""

FEWEST_LOADS = 4
"""Of a lane in a clipped block by default."""

BAND = 1 << 22
"""Steps that are decoded at a time."""


@dataclass(frozen=True)
class _Bundles:
    """Clipped blocks of one granularity and vector, with the steps of their lanes.

    Args:
        granularity: rows of each block.
        vector: columns that a lane loads at a time.
        columns: [bundles] int64, columns a lane, a multiple of the vector.
        rows: [bundles, granularity] int64.
        bundle, lane, step, column, real: [steps]; the steps of a lane follow each other; real is False for padding.
    """

    granularity: int
    vector: int
    columns: Tensor
    rows: Tensor
    bundle: Tensor
    lane: Tensor
    step: Tensor
    column: Tensor
    real: Tensor


def pack(weight: Tensor, sets: list[Blocks], delta_bits: int, clip: int) -> tuple[Params, dict[str, Tensor]]:
    """Store the blocks that were extracted from a weight.

    Args:
        weight: [N, K].
        sets: of each granularity, ascending; together its non-zeros.
        delta_bits: 4 or 8.
        clip: the most loads that a lane makes in one block; 0 for twice the mean.
    """
    n, k = weight.shape
    clip = clip or _default_clip(sets)
    bundles = [made for blocks in reversed(sets) for made in _clipped(blocks, delta_bits, clip)]
    sizes = torch.cat([_sizes(found) for found in bundles]) if bundles else weight.new_zeros(0, 6, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    deltas, values, slots = (int(total) for total in sizes.sum(0)[FIRST_OFFSET:])
    tensors = {
        "values": weight.new_zeros(values),
        "deltas": torch.zeros(deltas, dtype=torch.uint8, device=weight.device),
        "bases": torch.zeros(len(sizes), LANES, dtype=torch.int64, device=weight.device),
    }
    first = 0
    for found in bundles:
        _write(found, weight, first, starts[first : first + len(found.columns), FIRST_OFFSET:], tensors)
        first += len(found.columns)
    rows = torch.cat([found.rows.flatten() for found in bundles]) if bundles else sizes.new_zeros(0)
    numbers = torch.empty_like(rows)
    numbers[rows.sort(stable=True).indices] = torch.arange(slots, device=rows.device)
    row_slots = torch.zeros(n + 1, dtype=torch.int32, device=rows.device)
    row_slots[1:] = rows.bincount(minlength=n).cumsum(0)
    params: Params = {
        "layout": "paper",
        "delta_bits": delta_bits,
        "n": n,
        "k": k,
        "granularity": int(max([1, *(found.granularity for found in bundles)])),
        "bundles": len(sizes),
        "values": values,
        "deltas": deltas,
        "slots": slots,
    }
    return params, {
        "values": tensors["values"],
        "deltas": packed_deltas(tensors["deltas"], delta_bits),
        "bases": narrowed(tensors["bases"], index_bits_for(k)),
        "bundles": torch.cat((sizes[:, :FIRST_OFFSET], starts[:, FIRST_OFFSET:]), 1).int(),
        "slots": numbers.int(),
        "row_slots": row_slots,
    }


def _sizes(found: _Bundles) -> Tensor:
    """Give granularity, vector, columns, deltas, values and slots of each bundle, [bundles, 6]."""
    fixed = [torch.full_like(found.columns, number) for number in (found.granularity, found.vector)]
    return sizes_of(torch.stack((*fixed, found.columns), 1))


def sizes_of(table: Tensor) -> Tensor:
    """Add to granularity, vector and columns, [bundles, 3], what a bundle has of deltas, values and slots."""
    granularity, _, columns = table.T
    steps = LANES * columns
    return torch.cat((table, torch.stack((steps, steps * granularity, granularity), 1)), 1)


def _default_clip(sets: list[Blocks]) -> int:
    blocks = sum(len(found.rows) for found in sets)
    columns = sum(int(found.columns.sum()) for found in sets)
    return max(FEWEST_LOADS, -(-2 * columns // (max(1, blocks) * LANES * LONG_VECTOR)))


def _clipped(blocks: Blocks, delta_bits: int, clip: int) -> Iterator[_Bundles]:
    """Cut blocks into a long part, a multiple of 32 * 4 columns, and what is left, padded to a multiple of 32."""
    block, column, real = _steps(blocks, delta_bits)
    counts = block.bincount(minlength=len(blocks.rows))
    within = rank_in_group(block, counts)
    whole = LANES * LONG_VECTOR
    long = counts // whole * whole
    for vector, first, count in ((LONG_VECTOR, 0 * long, long), (SHORT_VECTOR, long, counts - long)):
        kept = (within >= first[block]) & (within < (first + count)[block])
        if not kept.any():
            continue
        of, at = block[kept], (within - first[block])[kept]
        loads = -(-count // (LANES * vector))
        parts = -(-loads // clip)
        # Part i of a block begins with load i * loads // parts.
        part = ((at // (LANES * vector) + 1) * parts[of] - 1) // loads[of]
        owner = torch.arange(len(parts), device=parts.device).repeat_interleave(parts)
        number = rank_in_group(owner, parts)
        start = number * loads[owner] // parts[owner]
        columns = ((number + 1) * loads[owner] // parts[owner] - start) * vector
        order = columns.sort(descending=True, stable=True).indices
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        part = (parts.cumsum(0) - parts)[of] + part
        at = at - (start * LANES * vector)[part]
        yield _Bundles(
            granularity=blocks.granularity,
            vector=vector,
            columns=columns[order],
            rows=blocks.rows[owner[order]],
            bundle=place[part],
            lane=at // columns[part],
            step=at % columns[part],
            column=column[kept],
            real=real[kept],
        )


def _steps(blocks: Blocks, delta_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """List each block's columns; where a gap exceeds the range of a delta, zeros step across it (section 6.2)."""
    block, column = blocks.columns.nonzero(as_tuple=True)
    limit = (1 << delta_bits) - 1
    gap = column.diff(prepend=column[:1])
    gap = torch.where(block.diff(prepend=block[:1] - 1) == 0, gap, 1)
    repeats = 1 + (gap - 1) // limit
    source = torch.arange(len(column), device=column.device).repeat_interleave(repeats)
    rank = rank_in_group(source, repeats)
    real = rank == repeats[source] - 1
    return block[source], torch.where(real, column[source], (column - gap)[source] + limit * (rank + 1)), real


def _write(found: _Bundles, weight: Tensor, first: int, starts: Tensor, tensors: dict[str, Tensor]) -> None:
    """Put the steps of one granularity and vector where they belong; ``starts`` holds first delta, value and slot."""
    vector, granularity = found.vector, found.granularity
    first_delta, first_value, _ = starts.T
    inside = (found.step // vector * LANES + found.lane) * vector + found.step % vector
    begins = found.step == 0
    gaps = torch.where(begins, 0, found.column.diff(prepend=found.column[:1]))
    tensors["deltas"][first_delta[found.bundle] + inside] = gaps.to(torch.uint8)
    tensors["bases"][first + found.bundle[begins], found.lane[begins]] = found.column[begins]
    read = weight[found.rows[found.bundle], found.column[:, None]]
    member = torch.arange(granularity, device=weight.device)
    at = (first_value[found.bundle] + inside * granularity)[:, None] + member
    tensors["values"][at] = torch.where(found.real[:, None], read, 0)


@dataclass(frozen=True)
class _Walked:
    """Steps in the order in which lanes walk them, each [steps] int64; ``at`` is where the first value stands."""

    bundle: Tensor
    lane: Tensor
    column: Tensor
    at: Tensor


def _decode(packed: Packed) -> Iterator[_Walked]:
    """Walk every lane's deltas, some bundles at a time."""
    table = packed.tensors["bundles"].long()
    ends = (LANES * table[:, 2]).cumsum(0)
    first = 0
    while first < len(table):
        begin = ends[first] - LANES * table[first, 2]
        last = max(first + 1, int((ends <= begin + BAND).sum()))
        yield _decode_band(packed, table[first:last], first)
        first = last


def _decode_band(packed: Packed, table: Tensor, first: int) -> _Walked:
    granularity, vector, columns, first_delta, first_value, _ = table.T
    counts = columns.repeat_interleave(LANES)
    begins = counts.cumsum(0) - counts
    walk = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
    step = rank_in_group(walk, counts)
    bundle, lane = walk // LANES, walk % LANES
    width = vector[bundle]
    inside = (step // width * LANES + lane) * width + step % width
    bits = delta_bits_of(packed.params)
    walked = deltas_at(packed.tensors["deltas"], first_delta[bundle] + inside, bits).cumsum(0)
    before = torch.cat((walked.new_zeros(1), walked))[begins[walk]]
    bases = widened(packed.tensors["bases"][first : first + len(table)]).flatten()
    at = first_value[bundle] + inside * granularity[bundle]
    return _Walked(first + bundle, lane, bases[walk] + walked - before, at)


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the stored weights that are not zero, some at a time: row * K + column, and value."""
    granularity, slots = packed.tensors["bundles"].long()[:, [0, FIRST_OFFSET + 2]].T
    counts = packed.tensors["row_slots"].long().diff()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)[packed.tensors["slots"].long()]
    values = packed.tensors["values"]
    for steps in _decode(packed):
        for member in range(int(granularity.max())):
            held = (granularity[steps.bundle] > member).nonzero().squeeze(1)
            read = values[steps.at[held] + member]
            held, read = held[read != 0], read[read != 0]
            yield rows[slots[steps.bundle[held]] + member] * packed.shape[1] + steps.column[held], read


def check(packed: Packed) -> None:
    """Check every size, offset and slot, that no lane walks past column K, and that no weight is stored twice.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    _check_table(packed)
    _check_slots(packed)
    k = packed.shape[1]
    refuse_first(widened(packed.tensors["bases"]) >= k, "bases", f"the column is not below K = {k}")
    for steps in _decode(packed):
        beyond = steps.column >= k
        if beyond.any():
            at = int(beyond.nonzero()[0])
            lane, bundle, column = (int(t[at]) for t in (steps.lane, steps.bundle, steps.column))
            raise FormatError(f"tensor deltas: lane {lane} of bundle {bundle} walks to column {column}, past K = {k}")
    refuse_repeats(packed.shape, stored_weights(packed))


def _check_table(packed: Packed) -> None:
    """Check that the bundles fill deltas, values and slots one after another."""
    table = packed.tensors["bundles"].long()
    granularity, vector, columns = table[:, :FIRST_OFFSET].T
    known = torch.tensor(GRANULARITIES, device=table.device)
    refuse_first(~torch.isin(granularity, known), "bundles", f"the granularity is none of {GRANULARITIES}")
    coarsest = max([1, *granularity.tolist()])
    if packed.params.get("granularity") != coarsest:
        raise FormatError(f"params: granularity is {packed.params.get('granularity')!r}, the bundles say {coarsest}")
    refuse_first((vector != SHORT_VECTOR) & (vector != LONG_VECTOR), "bundles", "the vector is neither 1 nor 4")
    refuse_first((columns < 1) | (columns % vector != 0), "bundles", "the columns are no multiple of the vector")
    sizes = sizes_of(table[:, :FIRST_OFFSET])[:, FIRST_OFFSET:]
    for name, total in zip(("deltas", "values", "slots"), sizes.sum(0).tolist(), strict=True):
        if packed.params[name] != total:
            raise FormatError(f"tensor bundles describes {total} {name}, params say {packed.params[name]!r}")
    wrong = table[:, FIRST_OFFSET:] != sizes.cumsum(0) - sizes
    refuse_first(wrong, "bundles", "an offset is not where the bundle before it ends")


def _check_slots(packed: Packed) -> None:
    starts, slots = packed.tensors["row_slots"].long(), packed.tensors["slots"].long()
    if starts[0] != 0 or starts[-1] != len(slots):
        found = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor row_slots runs from {found}, expected 0 to {len(slots)}")
    refuse_first(starts.diff() < 0, "row_slots", "a row's slots begin before those of the row before it")
    refuse_first((slots < 0) | (slots >= len(slots)), "slots", f"the slot is none of {len(slots)}")
    twice = slots.bincount(minlength=len(slots)) != 1
    refuse_first(twice, "slots", "not one sum belongs to this slot")

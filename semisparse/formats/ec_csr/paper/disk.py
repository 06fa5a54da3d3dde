"""The layout `paper`, EC-CSR (section 6): rows of a block share columns; each lane reads a contiguous part of them.

A *bundle* is what one warp reads: a block, or a part of one that is cut (clipped) because it has too many columns. A
*slot* is the index of the partial sum that a row of a bundle writes (README.md, "EC-CSR").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Scalar, TensorSpec, WeightSpec
from semisparse.formats.ec_csr.paper.extract import Blocks, Progress, extract
from semisparse.formats.ec_csr.storage.deltas import (
    INDEX_DTYPES,
    LANES,
    PAPER,
    bridged,
    delta_bits_of,
    deltas_at,
    index_bits_for,
    narrowed,
    packed_deltas,
    rank_in_group,
    widened,
)

GRANULARITIES = (1, 2, 4, 8)
"""Rows per block. On random masks of 50 % zeros and with ``multiple`` 32, 38 % of the weights end up in blocks of 4
rows, few in blocks of 8."""

FIELDS = ("granularity", "vector", "columns", "first_delta", "first_value", "first_slot")
"""The numbers that describe a bundle: rows of its block, columns per load, columns per lane; indices of its first
delta, value and slot."""

FIRST_OFFSET = FIELDS.index("first_delta")
"""Index of the first of the fields that say where a bundle's deltas, values and slots begin."""

LONG_VECTOR, SHORT_VECTOR = 4, 1
"""Columns per load: of a block, and of the rest of a one-row block (section 6.3)."""

FEWEST_LOADS = 4
"""Minimum default of ``clip``."""

BATCH = 1 << 22
"""List entries that are decoded at a time."""


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return (
        TensorSpec("values", None, ("values",)),
        TensorSpec("deltas", torch.uint8, ("delta_bytes",)),
        TensorSpec("bases", INDEX_DTYPES[index_bits_for(spec.shape[1])], ("bundles", "lanes")),
        TensorSpec("bundles", torch.int32, ("bundles", "fields")),
        TensorSpec("slots", torch.int32, ("slots",)),
        TensorSpec("row_slots", torch.int32, ("N+1",)),
    )


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    return {
        "values": int(spec.params["values"]),
        "delta_bytes": int(spec.params["deltas"]) * delta_bits_of(spec.params) // 8,
        "bundles": int(spec.params["bundles"]),
        "lanes": LANES,
        "fields": len(FIELDS),
        "slots": int(spec.params["slots"]),
    }


@dataclass(frozen=True)
class _Bundles:
    """The bundles of one granularity and vector, with the entries of their lanes.

    Args:
        granularity: rows per block.
        vector: columns per load.
        columns: [bundles] int64, columns per lane, a multiple of ``vector``.
        rows: [bundles, granularity] int64, the rows of w in each bundle.
        bundle, lane, number, column: [entries] int64: bundle and lane of each entry, its index in the lane, its column.
        is_weight: [entries] bool, False for padding that bridges a gap.
    """

    granularity: int
    vector: int
    columns: Tensor
    rows: Tensor
    bundle: Tensor
    lane: Tensor
    number: Tensor
    column: Tensor
    is_weight: Tensor


def pack(
    weight: Tensor, delta_bits: Sequence[int], granularity: int, multiple: int, clip: int, progress: Progress
) -> list[tuple[Mapping[str, Scalar], dict[str, Tensor]]]:
    """Extract blocks of rows from ``weight`` ([N, K]) and store them, once for each of the widths ``delta_bits``.

    Args:
        weight: [N, K].
        delta_bits: the widths, each 4 or 8.
        granularity, multiple: as in `extract`.
        clip: maximum loads per lane and bundle (section 5); 0 for twice the mean.
        progress: as in `extract`; each width is an extraction of its own.
    Returns:
        Params and tensors for each of ``delta_bits``.
    """
    results = []
    for index, bits in enumerate(delta_bits):

        def of_all(done: int, total: int, before: int = index) -> None:
            progress(before * total + done, len(delta_bits) * total)

        sets = extract(weight != 0, multiple, granularity, (1 << bits) - 1, of_all)
        results.append(_packed(weight, sets, bits, clip or _default_clip(sets)))
    return results


def _packed(
    weight: Tensor, sets: list[Blocks], delta_bits: int, clip: int
) -> tuple[Mapping[str, Scalar], dict[str, Tensor]]:
    """Store blocks as bundles, the coarsest granularity first; return params and tensors.

    Args:
        sets: the blocks of each granularity, ascending.
    """
    n, k = weight.shape
    bundles = [clipped for blocks in reversed(sets) for clipped in _clipped(blocks, delta_bits, clip)]
    sizes = torch.cat([_sizes(each) for each in bundles]) if bundles else weight.new_zeros(0, 6, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    deltas, values, slots = (int(total) for total in sizes.sum(0)[FIRST_OFFSET:])
    tensors = {
        "values": weight.new_zeros(values),
        "deltas": torch.zeros(deltas, dtype=torch.uint8, device=weight.device),
        "bases": torch.zeros(len(sizes), LANES, dtype=torch.int64, device=weight.device),
    }
    first = 0
    for each in bundles:
        _write(each, weight, first, starts[first : first + len(each.columns), FIRST_OFFSET:], tensors)
        first += len(each.columns)
    rows = torch.cat([each.rows.flatten() for each in bundles]) if bundles else sizes.new_zeros(0)
    slot_of = torch.empty_like(rows)
    slot_of[rows.sort(stable=True).indices] = torch.arange(slots, device=rows.device)
    row_slots = torch.zeros(n + 1, dtype=torch.int32, device=rows.device)
    row_slots[1:] = rows.bincount(minlength=n).cumsum(0)
    params: dict[str, Scalar] = {
        "layout": PAPER,
        "delta_bits": delta_bits,
        "n": n,
        "k": k,
        "granularity": max([1, *(each.granularity for each in bundles)]),
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
        "slots": slot_of.int(),
        "row_slots": row_slots,
    }


def _sizes(bundles: _Bundles) -> Tensor:
    """Return granularity, vector, columns per lane, and numbers of deltas, values and slots: [bundles, 6] int64."""
    fixed = [torch.full_like(bundles.columns, number) for number in (bundles.granularity, bundles.vector)]
    return sizes_of(torch.stack((*fixed, bundles.columns), 1))


def sizes_of(table: Tensor) -> Tensor:
    """Append the numbers of deltas, values and slots to the first three fields: [bundles, 3] to [bundles, 6]."""
    granularity, _, columns = table.T
    entries = LANES * columns
    return torch.cat((table, torch.stack((entries, entries * granularity, granularity), 1)), 1)


def _default_clip(sets: list[Blocks]) -> int:
    """Return twice the mean number of loads per lane and block, at least `FEWEST_LOADS`."""
    blocks = sum(len(each.rows) for each in sets)
    columns = sum(int(each.columns.sum()) for each in sets)
    return max(FEWEST_LOADS, -(-2 * columns // (max(1, blocks) * LANES * LONG_VECTOR)))


def _clipped(blocks: Blocks, delta_bits: int, clip: int) -> Iterator[_Bundles]:
    """Cut each block into a long part, a multiple of 32 * 4 columns, and the rest, padded to a multiple of 32 columns.

    Args:
        clip: maximum loads per lane and bundle; a part with more becomes several bundles of nearly equal length.
    Returns:
        The bundles of each part, if there are any.
    """
    block, column = blocks.columns.nonzero(as_tuple=True)
    block, column, is_weight = bridged(block, column, (1 << delta_bits) - 1)
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
        bundle_of = torch.empty_like(order)
        bundle_of[order] = torch.arange(len(order), device=order.device)
        part = (parts.cumsum(0) - parts)[of] + part
        at = at - (start * LANES * vector)[part]
        yield _Bundles(
            granularity=blocks.granularity,
            vector=vector,
            columns=columns[order],
            rows=blocks.rows[owner[order]],
            bundle=bundle_of[part],
            lane=at // columns[part],
            number=at % columns[part],
            column=column[kept],
            is_weight=is_weight[kept],
        )


def _write(bundles: _Bundles, weight: Tensor, first: int, starts: Tensor, tensors: dict[str, Tensor]) -> None:
    """Write the entries of the bundles of one granularity and vector to ``tensors``.

    Args:
        first: index of the first of these bundles.
        starts: [bundles, 3] int64, indices of their first delta, value and slot.
    """
    vector, granularity = bundles.vector, bundles.granularity
    first_delta, first_value, _ = starts.T
    inside = (bundles.number // vector * LANES + bundles.lane) * vector + bundles.number % vector
    begins = bundles.number == 0
    gaps = torch.where(begins, 0, bundles.column.diff(prepend=bundles.column[:1]))
    tensors["deltas"][first_delta[bundles.bundle] + inside] = gaps.to(torch.uint8)
    tensors["bases"][first + bundles.bundle[begins], bundles.lane[begins]] = bundles.column[begins]
    read = weight[bundles.rows[bundles.bundle], bundles.column[:, None]]
    member = torch.arange(granularity, device=weight.device)
    at = (first_value[bundles.bundle] + inside * granularity)[:, None] + member
    tensors["values"][at] = torch.where(bundles.is_weight[:, None], read, 0)


@dataclass(frozen=True)
class Entries:
    """Decoded entries, lane after lane, each [entries] int64; ``at`` is the index of an entry's first value."""

    bundle: Tensor
    lane: Tensor
    column: Tensor
    at: Tensor


def decode(packed: Packed) -> Iterator[Entries]:
    """Yield the entries of all lanes, some bundles at a time."""
    table = packed.tensors["bundles"].long()
    ends = (LANES * table[:, 2]).cumsum(0)
    first = 0
    while first < len(table):
        begin = ends[first] - LANES * table[first, 2]
        last = max(first + 1, int((ends <= begin + BATCH).sum()))
        yield _decode_bundles(packed, table[first:last], first)
        first = last


def _decode_bundles(packed: Packed, table: Tensor, first: int) -> Entries:
    granularity, vector, columns, first_delta, first_value, _ = table.T
    counts = columns.repeat_interleave(LANES)
    begins = counts.cumsum(0) - counts
    of = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
    number = rank_in_group(of, counts)
    bundle, lane = of // LANES, of % LANES
    width = vector[bundle]
    inside = (number // width * LANES + lane) * width + number % width
    bits = delta_bits_of(packed.params)
    sums = deltas_at(packed.tensors["deltas"], first_delta[bundle] + inside, bits).cumsum(0)
    before = torch.cat((sums.new_zeros(1), sums))[begins[of]]
    bases = widened(packed.tensors["bases"][first : first + len(table)]).flatten()
    at = first_value[bundle] + inside * granularity[bundle]
    return Entries(first + bundle, lane, bases[of] + sums - before, at)


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the stored weights that are not zero, some at a time: row * K + column, int64, and value."""
    granularity, slots = packed.tensors["bundles"].long()[:, [0, FIRST_OFFSET + 2]].T
    counts = packed.tensors["row_slots"].long().diff()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)[packed.tensors["slots"].long()]
    values = packed.tensors["values"]
    for entries in decode(packed):
        for member in range(int(granularity.max())):
            held = (granularity[entries.bundle] > member).nonzero().squeeze(1)
            read = values[entries.at[held] + member]
            held, read = held[read != 0], read[read != 0]
            yield rows[slots[entries.bundle[held]] + member] * packed.shape[1] + entries.column[held], read

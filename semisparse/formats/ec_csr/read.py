"""Tensors back to weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.layout import (
    FIRST_OFFSET,
    LANES,
    NO_SLOT,
    PANEL_ROWS,
    delta_bits_of,
    layout_of,
    sizes_of,
    widened,
)

BAND = 1 << 22
"""Steps that are decoded at a time."""


@dataclass(frozen=True)
class Decoded:
    """Some steps in the order in which lanes walk them.

    Args:
        bundle: [steps] int64.
        lane: [steps] int64.
        column: [steps] int64.
        value: [steps] int64, where the step's first value stands.
    """

    bundle: Tensor
    lane: Tensor
    column: Tensor
    value: Tensor


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    n, k = packed.shape
    values = packed.tensors["values"]
    weight = torch.zeros(n, k, dtype=packed.dtype, device=values.device)
    flat = weight.view(-1)
    for places, kept in stored_weights(packed):
        flat[places] = kept
    return weight


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the stored weights that are not zero, band by band: row * K + column, and value."""
    granularity, slots = packed.tensors["bundles"].T.long()[[0, 5]]
    rows = rows_of_slots(packed)
    values = packed.tensors["values"]
    shared = layout_of(packed.params) == "paper"
    for steps in decode(packed):
        size = granularity[steps.bundle]
        owner = slots[steps.bundle] + (0 if shared else steps.lane * size)
        for member in range(int(size.max())):
            held = (size > member).nonzero().squeeze(1)
            kept = values[steps.value[held] + member]
            stored = kept != 0
            held, kept = held[stored], kept[stored]
            yield rows[owner[held] + member] * packed.shape[1] + steps.column[held], kept


def rows_of_slots(packed: Packed) -> Tensor:
    """Give the row of each stored slot, -1 for those of no block."""
    slots, starts = packed.tensors["slots"], packed.tensors["row_slots"].long()
    rows = torch.arange(packed.shape[0], device=slots.device).repeat_interleave(starts.diff())
    if layout_of(packed.params) == "paper":
        return rows[slots.long()]
    numbers = widened(slots)
    absent = numbers == NO_SLOT
    absolute = (numbers + starts[:-1:PANEL_ROWS][panel_of_slots(packed)])[~absent]
    found = torch.full_like(numbers, -1)
    found[~absent] = rows[absolute]
    return found


def panel_of_slots(packed: Packed) -> Tensor:
    """Give the panel of each slot of the layout `panels`."""
    table = packed.tensors["bundles"].long()
    slots = sizes_of(table[:, :FIRST_OFFSET], LANES)[:, 2]
    panel = torch.arange(len(table), device=table.device) // int(packed.params["panel_bundles"])
    return panel.repeat_interleave(slots)


def decode(packed: Packed) -> Iterator[Decoded]:
    """Walk every lane's deltas, a band of bundles at a time."""
    table = packed.tensors["bundles"].long()
    ends = (LANES * table[:, 2]).cumsum(0)
    first, bundles = 0, len(table)
    while first < bundles:
        begin = ends[first] - LANES * table[first, 2]
        last = max(first + 1, int((ends <= begin + BAND).sum()))
        yield _decode_band(packed, table[first:last], first)
        first = last


def _decode_band(packed: Packed, table: Tensor, first: int) -> Decoded:
    granularity, vector, columns, first_delta, first_value, _ = table.T
    counts = columns.repeat_interleave(LANES)
    begins = counts.cumsum(0) - counts
    walk = torch.arange(len(counts), device=table.device).repeat_interleave(counts)
    step = torch.arange(len(walk), device=table.device) - begins[walk]
    bundle, lane = walk // LANES, walk % LANES
    width = vector[bundle]
    inside = (step // width * LANES + lane) * width + step % width
    walked = _deltas(packed, first_delta[bundle] + inside).cumsum(0)
    before = torch.cat((walked.new_zeros(1), walked))[begins[walk]]
    bases = widened(packed.tensors["bases"][first : first + len(table)]).flatten()
    value = first_value[bundle] + inside * granularity[bundle]
    return Decoded(first + bundle, lane, bases[walk] + walked - before, value)


def _deltas(packed: Packed, places: Tensor) -> Tensor:
    stored = packed.tensors["deltas"]
    if delta_bits_of(packed.params) == 8:
        return stored[places].long()
    return (stored[places // 2].long() >> places % 2 * 4) & 15

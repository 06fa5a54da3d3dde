"""The layout `banks`: lane l has the columns l, l + 32, l + 64, ..., so that no two lanes want one bank of x."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.checks import refuse_first
from semisparse.formats.ec_csr import cpu
from semisparse.formats.ec_csr.layout import (
    BACK,
    LANES,
    RUN,
    SEGMENTS,
    delta_bits_of,
    deltas_at,
    index_bits_for,
    narrowed,
    packed_deltas,
    panel_rows_for,
    panel_rows_of,
    rank_in_group,
    refuse_repeats,
    vector_of,
    widened,
)
from semisparse.patterns.base import blocks_along
from semisparse.runtime import cpp

BATCH = 1 << 24
"""Weights or steps that are packed or read at a time."""


def pack(weight: Tensor, delta_bits: int) -> tuple[Params, dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K]) with deltas of ``delta_bits``."""
    n, k = weight.shape
    rows = panel_rows_for(n)
    panels = blocks_along(blocks_along(weight, LANES, dim=1).flatten(1), rows, dim=0)
    width = max(1, BATCH // panels[0].numel())
    batches = [_Lists(batch, delta_bits) for batch in panels.split(width)]
    loads = torch.cat([batch.loads for batch in batches])
    parts = [lists.write(of) for lists, of in zip(batches, loads.split(width), strict=True)]
    values, deltas, bases = (torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
    panel_loads = torch.zeros(len(panels) + 1, dtype=torch.int32, device=weight.device)
    panel_loads[1:] = loads.cumsum(0)
    params: Params = {
        "layout": "banks",
        "delta_bits": delta_bits,
        "n": n,
        "k": k,
        "panel_rows": rows,
        "values": len(values),
        "span": max(part[3] for part in parts),
    }
    return params, {
        "values": values,
        "deltas": packed_deltas(deltas, delta_bits),
        "bases": narrowed(bases, index_bits_for(k)),
        "panel_loads": panel_loads,
    }


class _Lists:
    """The lists of some panels, [panels, rows, columns], columns a multiple of 32.

    A lane's list runs through its columns of each row in turn: the place in it is row * height + column // 32.
    """

    def __init__(self, panels: Tensor, delta_bits: int) -> None:
        self.panels, rows, columns = panels.shape
        self.height, self.vector = columns // LANES, vector_of(panels.dtype)
        by_lane = panels.view(self.panels, rows, self.height, LANES).permute(0, 3, 1, 2)
        self.weights = by_lane.reshape(self.panels * LANES, rows * self.height)
        self.owner, self.place, self.real = _steps(self.weights, self.height, (1 << delta_bits) - 1)
        self.lengths = self.owner.bincount(minlength=self.panels * LANES)
        self.loads = -(-self.lengths.view(self.panels, LANES).amax(1) // self.vector)

    def write(self, loads: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Give values, deltas a byte each, bases, and the most rows that a lane meets in a segment.

        Args:
            loads: [panels], of each lane.
        """
        owner, place, vector, device = self.owner, self.place, self.vector, self.place.device
        index = rank_in_group(owner, self.lengths)
        panel, lane, load = owner // LANES, owner % LANES, index // vector
        at = (((loads.cumsum(0) - loads)[panel] + load) * LANES + lane) * vector + index % vector
        size = int(loads.sum()) * LANES * vector
        values = torch.zeros(size, dtype=self.weights.dtype, device=device)
        values[at] = torch.where(self.real, self.weights[owner, place], 0)
        segment, begins = _segments(load, loads[panel])
        starts = index == begins * vector
        deltas = torch.zeros(size, dtype=torch.uint8, device=device)
        deltas[at] = torch.where(starts, 0, place.diff(prepend=place[:1])).to(torch.uint8)
        bases = torch.zeros(self.panels * SEGMENTS, LANES, dtype=torch.int64, device=device)
        segment += panel * SEGMENTS
        bases[segment[starts], lane[starts]] = place[starts]
        rows = place // self.height - bases[segment, lane] // self.height
        return values, deltas, bases, 1 + (int(rows.max()) if len(rows) else 0)


def _steps(lists: Tensor, height: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the steps of each lane: the non-zeros, and padding where they are too far apart or end a row too early.

    Args:
        lists: [lists, rows * height].
        height: places of a row.
        limit: of a delta; a step reaches the next row at most, so ``height`` is another.
    Returns:
        Each step's list and place, both int64, and whether it is a weight.
    """
    owner, place = lists.nonzero(as_tuple=True)
    limit = min(limit, height)
    gap = place.diff(prepend=place[:1])
    gap = torch.where(owner.diff(prepend=owner[:1] - 1) == 0, gap, 1)
    repeats = 1 + (gap - 1) // limit
    source = torch.arange(len(place), device=place.device).repeat_interleave(repeats)
    rank = rank_in_group(source, repeats)
    real = rank == repeats[source] - 1
    place = torch.where(real, place[source], (place - gap)[source] + limit * (rank + 1))
    owner = owner[source]
    row = owner * (lists.shape[1] // height) + place // height
    last = row.diff(append=row[-1:] + 1) != 0
    inside = rank_in_group(row, row.bincount())
    repeats = 1 + torch.where(last, -(inside + 1) % RUN, 0)
    source = torch.arange(len(place), device=place.device).repeat_interleave(repeats)
    return owner[source], place[source], real[source] & (rank_in_group(source, repeats) == 0)


def _segments(load: Tensor, loads: Tensor) -> tuple[Tensor, Tensor]:
    """Give the segment of a load, and the load it begins with; segment s of L loads begins with s * L // 16."""
    segment = ((load + 1) * SEGMENTS - 1) // loads.clamp(min=1)
    return segment, segment * loads // SEGMENTS


@dataclass(frozen=True)
class _Walked:
    """The steps of some panels, a list after another, each [steps] int64.

    Args:
        panel, lane: whose list it is.
        index: in the list.
        at: where its delta and its value stand.
        delta: from the place before it, or from the base where a segment begins.
        base: of its segment.
        place: in the list's rows.
        begins: whether a segment begins with it, bool.
    """

    panel: Tensor
    lane: Tensor
    index: Tensor
    at: Tensor
    delta: Tensor
    base: Tensor
    place: Tensor
    begins: Tensor


def _decode(packed: Packed) -> Iterator[_Walked]:
    """Walk every lane's list, some panels at a time."""
    starts = packed.tensors["panel_loads"].long()
    vector = vector_of(packed.dtype)
    bases = widened(packed.tensors["bases"]).view(-1, SEGMENTS, LANES)
    first, panels = 0, len(starts) - 1
    while first < panels:
        last = max(first + 1, int((starts <= starts[first] + BATCH // (LANES * vector)).sum()) - 1)
        loads = starts[first : last + 1].diff()
        lengths = (loads * vector).repeat_interleave(LANES)
        lists = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        index = rank_in_group(lists, lengths)
        panel, lane = first + lists // LANES, lists % LANES
        segment, begins = _segments(index // vector, loads[panel - first])
        at = ((starts[panel] + index // vector) * LANES + lane) * vector + index % vector
        delta = deltas_at(packed.tensors["deltas"], at, delta_bits_of(packed.params))
        walked = delta.cumsum(0)
        before = torch.cat((walked.new_zeros(1), walked))
        step = torch.arange(len(lists), device=starts.device)
        begin = step - (index - begins * vector)
        base = bases[panel, segment, lane]
        yield _Walked(panel, lane, index, at, delta, base, base + walked - before[begin], begin == step)
        first = last


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the stored weights that are not zero, some at a time: row * K + column, and value."""
    k = packed.shape[1]
    height = -(-k // LANES)
    for steps in _decode(packed):
        values = packed.tensors["values"][steps.at]
        kept = values != 0
        panel, lane, place = steps.panel[kept], steps.lane[kept], steps.place[kept]
        row = panel * panel_rows_of(packed.params) + place // height
        yield row * k + place % height * LANES + lane, values[kept]


def check(packed: Packed) -> None:
    """Check that every list stays inside its panel's rows, meets each row in turn, and keeps each weight once, below K.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    (_, k), vector = packed.shape, vector_of(packed.dtype)
    height, rows = -(-k // LANES), panel_rows_of(packed.params)
    starts = packed.tensors["panel_loads"].long()
    stored = packed.tensors["values"].numel()
    if starts[0] != 0 or starts[-1] * LANES * vector != stored:
        found = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor panel_loads runs from {found}, expected 0 to {stored / (LANES * vector):g}")
    refuse_first(starts.diff() < 0, "panel_loads", "a panel begins before the one before it")
    bases = widened(packed.tensors["bases"])
    refuse_first((bases < 0) | (bases >= rows * height), "bases", f"the place is not below {rows * height}")
    first_loads = torch.arange(SEGMENTS + 1, device=starts.device) * starts.diff()[:, None] // SEGMENTS
    empty = (first_loads.diff() == 0).view(-1, 1)
    refuse_first(empty & (bases != 0), "bases", "the segment has no loads, so it is 0")
    if bases.device.type == "cpu" and cpp.refusal() is None:  # 1000 times as fast, and loading waits for it
        cpu.check_lists(packed)
        return
    check_lists(packed)
    refuse_repeats(packed.shape, stored_weights(packed))


def check_lists(packed: Packed) -> None:
    """Check every step of every list, where ec_csr.cpp cannot; the last check of `check` is apart.

    Raises:
        FormatError: names the lane and the panel, and what is wrong.
    """
    (n, k), rows = packed.shape, panel_rows_of(packed.params)
    height = -(-k // LANES)
    span = 1
    for steps in _decode(packed):
        row = steps.place // height
        if len(row):
            span = max(span, 1 + int((row - steps.base // height).max()))
        _refuse_step(steps.place >= rows * height, steps, "leaves its panel")
        _refuse_step(_goes_back(steps, rows * height, packed.tensors["values"]), steps, BACK)
        # Kernels look for the end of a row before every second step, and take one row then.
        crossed = row - (steps.place - steps.delta) // height
        _refuse_step((steps.index % RUN != 0) & (crossed != 0), steps, "ends a row where no kernel looks for it")
        _refuse_step(crossed > 1, steps, "passes over a row")
        weight = packed.tensors["values"][steps.at] != 0
        _refuse_step(weight & (steps.place % height * LANES + steps.lane >= k), steps, f"has a weight past K = {k}")
        _refuse_step(steps.panel * rows + row >= n, steps, f"goes past row N = {n}")
    if packed.params.get("span") != span:
        raise FormatError(f"params: span is {packed.params.get('span')!r}, the lists have {span}")


def _goes_back(steps: _Walked, places: int, values: Tensor) -> Tensor:
    """Say which steps begin a segment below a weight before it: `unpack.cu` takes bases for the ends of segments.

    Args:
        places: of a panel.
    """
    begin = (steps.panel * LANES + steps.lane) * places
    reached = torch.where(values[steps.at] != 0, begin + steps.place, begin).cummax(0).values
    before = torch.cat((reached.new_zeros(1), reached))[:-1]
    return steps.begins & (steps.base != 0) & (begin + steps.base < before)


def _refuse_step(bad: Tensor, steps: _Walked, what: str) -> None:
    if bad.any():
        at = int(bad.nonzero()[0])
        lane, panel = int(steps.lane[at]), int(steps.panel[at])
        raise FormatError(f"tensor deltas: the list of lane {lane} in panel {panel} {what}")

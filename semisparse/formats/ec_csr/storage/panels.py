"""Row panels, the default layout: lane l has the columns l, l + 32, ..., so that lanes read x in different banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Params, Scalar, TensorSpec, WeightSpec, choice_of
from semisparse.formats.ec_csr.storage.deltas import (
    INDEX_DTYPES,
    LANES,
    PANELS,
    bridged,
    delta_bits_of,
    deltas_at,
    index_bits_for,
    narrowed,
    packed_deltas,
    rank_in_group,
    widened,
)
from semisparse.patterns.base import blocks_along

PANEL_ROWS = tuple(range(28, 65, 4))
"""The numbers of rows that a panel may have. A CTA computes one panel."""

DISK_PANEL_ROWS = 32
"""Rows per panel of a new weight on disk. Files of earlier versions may have any of `PANEL_ROWS`."""

SEGMENTS = 16
"""Parts of equal length that each list is cut into, one for each warp of a CTA."""

ROW_MULTIPLE = 2
"""A row's entries in a list are a multiple of this, so that kernels test for the end of a row half as often."""

LOAD_BYTES = 16
"""Bytes of values that a lane loads at a time."""

PAIRED = "paired"
"""The param of weights on a GPU whose panels are `paired <is_paired>`: so one CTA has a gate's row and that of up."""

STORED = ("values", "deltas", "bases", "panel_loads")

BATCH = 1 << 22
"""Dense weights packed, or list entries decoded, at a time on a CPU. int64 temporaries take some 100 bytes for each."""

GPU_BATCH = 1 << 25
"""The same on a GPU with memory to spare: each batch takes some 60 launches and waits for several of them."""


def batch_for(device: torch.device) -> int:
    """Return how many weights are packed, or entries decoded, at a time: temporaries take a quarter of free memory."""
    if device.type != "cuda":
        return BATCH
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(BATCH, min(GPU_BATCH, (torch.cuda.mem_get_info(device)[0] + cached) // 400))


def panel_rows_of(params: Params) -> int:
    """Return the rows per panel, a multiple of 4 from 28 to 64.

    Raises:
        FormatError: it is another number.
    """
    return choice_of("ec_csr", params, "panel_rows", PANEL_ROWS)


def is_paired(params: Params) -> bool:
    """Return whether the first half of a panel's rows belong to the weight's first half of rows, the rest to the other.

    Raises:
        FormatError: `PAIRED` is another number than 0 and 1.
    """
    return PAIRED in params and choice_of("ec_csr", params, PAIRED, (0, 1)) == 1


def rows_of_panels(n: int, panel_rows: int, paired: bool, device: torch.device) -> Tensor:
    """Return the weight's row that each row of the panels is, [panels * panel_rows] int64, n where there is none."""
    rows = torch.arange(-(-n // panel_rows) * panel_rows, device=device)
    if not paired:
        return rows.clamp(max=n)
    first_half, half = -(-n // 2), panel_rows // 2
    panel, row = rows // panel_rows, rows % panel_rows
    in_half = row - (first_half - panel * half).clamp(max=half)  # the last panel may have fewer rows of the first half
    return (panel * half + torch.where(in_half < 0, row, first_half + in_half)).clamp(max=n)


def vector_of(dtype: torch.dtype) -> int:
    """Return the values per load."""
    return LOAD_BYTES // dtype.itemsize


def lane_columns_of(k: int) -> int:
    """Return the columns per lane of a weight with ``k`` columns, H in README.md."""
    return -(-k // LANES)


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return (
        TensorSpec("values", None, ("values",)),
        TensorSpec("deltas", torch.uint8, ("delta_bytes",)),
        TensorSpec("bases", INDEX_DTYPES[index_bits_for(spec.shape[1])], ("segments", "lanes")),
        TensorSpec("panel_loads", torch.int32, ("panels+1",)),
    )


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    panels, values = -(-spec.shape[0] // panel_rows_of(spec.params)), int(spec.params["values"])
    return {
        "values": values,
        "delta_bytes": values * delta_bits_of(spec.params) // 8,
        "segments": panels * SEGMENTS,
        "lanes": LANES,
        "panels": panels,
    }


def lists_of(packed: Packed) -> dict[str, Tensor]:
    """Return the tensors of the row panels."""
    return {name: packed.tensors[name] for name in STORED}


def pack(
    weight: Tensor, delta_bits: int, panel_rows: int = DISK_PANEL_ROWS
) -> tuple[Mapping[str, Scalar], dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K]); the same bytes on every device."""
    n, k = weight.shape
    panels = blocks_along(blocks_along(weight, LANES, dim=1).flatten(1), panel_rows, dim=0)
    width = max(1, batch_for(weight.device) // panels[0].numel())
    batches = [_written(batch, delta_bits) for batch in panels.split(width)]
    loads, values, deltas, bases, spans = zip(*batches, strict=True)
    panel_loads = torch.zeros(len(panels) + 1, dtype=torch.int32, device=weight.device)
    panel_loads[1:] = torch.cat(loads).cumsum(0)
    tensors = {
        "values": torch.cat(values),
        "deltas": packed_deltas(torch.cat(deltas), delta_bits),
        "bases": narrowed(torch.cat(bases), index_bits_for(k)),
        "panel_loads": panel_loads,
    }
    return panel_params(n, k, delta_bits, panel_rows, len(tensors["values"]), max(spans)), tensors


def panel_params(n: int, k: int, delta_bits: int, panel_rows: int, values: int, span: int) -> dict[str, Scalar]:
    """Return the params of a weight [N, K] in row panels."""
    shape = {"n": n, "k": k, "panel_rows": panel_rows}
    return {"layout": PANELS, "delta_bits": delta_bits, **shape, "values": values, "span": span}


def _written(panels: Tensor, delta_bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Write the lists of some panels, [panels, rows, columns], columns a multiple of 32.

    Returns:
        Loads per list, [panels]; values; deltas, a byte each; bases, [panels * 16, 32] int64; and the span.
    """
    count, rows, columns = panels.shape
    device, lane_columns, vector = panels.device, columns // LANES, vector_of(panels.dtype)
    by_lane = panels.view(count, rows, lane_columns, LANES).permute(0, 3, 1, 2)
    weights = by_lane.reshape(count * LANES, rows * lane_columns)
    of, position, is_weight = _entries(weights, lane_columns, (1 << delta_bits) - 1)
    lengths = of.bincount(minlength=count * LANES)
    loads = -(-lengths.view(count, LANES).amax(1) // vector)

    number = rank_in_group(of, lengths)
    panel, lane, load = of // LANES, of % LANES, number // vector
    at = (((loads.cumsum(0) - loads)[panel] + load) * LANES + lane) * vector + number % vector
    size = int(loads.sum()) * LANES * vector
    values = torch.zeros(size, dtype=panels.dtype, device=device)
    values[at] = torch.where(is_weight, weights[of, position], 0)
    segment, first_load = segments_of(load, loads[panel])
    begins = number == first_load * vector
    deltas = torch.zeros(size, dtype=torch.uint8, device=device)
    deltas[at] = torch.where(begins, 0, position.diff(prepend=position[:1])).to(torch.uint8)
    bases = torch.zeros(count * SEGMENTS, LANES, dtype=torch.int64, device=device)
    segment += panel * SEGMENTS
    bases[segment[begins], lane[begins]] = position[begins]
    row_of_segment = position // lane_columns - bases[segment, lane] // lane_columns
    return loads, values, deltas, bases, 1 + (int(row_of_segment.max()) if len(position) else 0)


def _entries(lists: Tensor, lane_columns: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the entries of each lane: its weights, and padding where gaps are too wide or a row has an odd number.

    Args:
        lists: [lists, rows * lane_columns].
        lane_columns: columns per lane, which also limit a delta: an entry is at most in the row after the one before.
        limit: maximum delta.
    Returns:
        Each entry's list and position, both int64, and whether it is a weight.
    """
    of, position = lists.nonzero(as_tuple=True)
    of, position, is_weight = bridged(of, position, min(limit, lane_columns))
    row = of * (lists.shape[1] // lane_columns) + position // lane_columns
    ends_row = row.diff(append=row[-1:] + 1) != 0
    in_row = rank_in_group(row, row.bincount())
    repeats = 1 + torch.where(ends_row, -(in_row + 1) % ROW_MULTIPLE, 0)
    source = torch.arange(len(position), device=position.device).repeat_interleave(repeats)
    return of[source], position[source], is_weight[source] & (rank_in_group(source, repeats) == 0)


def segments_of(load: Tensor, loads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the segment of a load, and its first load: segment s of L loads begins with load s * L // 16."""
    segment = ((load + 1) * SEGMENTS - 1) // loads.clamp(min=1)
    return segment, segment * loads // SEGMENTS


@dataclass(frozen=True)
class Entries:
    """Decoded entries of some panels, list after list, each [entries] int64.

    Args:
        panel, lane: the panel and the lane whose list it is in.
        number: its index in the list.
        at: index of its delta and of its value in the stored tensors.
        delta: from the position before it, or from the base if the entry is the first of a segment.
        base: of its segment.
        position: row of the panel * columns per lane + column // 32.
        begins: whether it is the first of a segment, bool.
    """

    panel: Tensor
    lane: Tensor
    number: Tensor
    at: Tensor
    delta: Tensor
    base: Tensor
    position: Tensor
    begins: Tensor


def decode(packed: Packed) -> Iterator[Entries]:
    """Decode the lists of all lanes, some panels at a time."""
    starts = packed.tensors["panel_loads"].long()
    vector = vector_of(packed.dtype)
    bases = widened(packed.tensors["bases"]).view(-1, SEGMENTS, LANES)
    first, panels, batch = 0, len(starts) - 1, batch_for(starts.device)
    while first < panels:
        last = max(first + 1, int((starts <= starts[first] + batch // (LANES * vector)).sum()) - 1)
        loads = starts[first : last + 1].diff()
        lengths = (loads * vector).repeat_interleave(LANES)
        lists = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        number = rank_in_group(lists, lengths)
        panel, lane = first + lists // LANES, lists % LANES
        segment, first_load = segments_of(number // vector, loads[panel - first])
        at = ((starts[panel] + number // vector) * LANES + lane) * vector + number % vector
        delta = deltas_at(packed.tensors["deltas"], at, delta_bits_of(packed.params))
        sums = delta.cumsum(0)
        before = torch.cat((sums.new_zeros(1), sums))
        entry = torch.arange(len(lists), device=starts.device)
        begin = entry - (number - first_load * vector)
        base = bases[panel, segment, lane]
        yield Entries(panel, lane, number, at, delta, base, base + sums - before[begin], begin == entry)
        first = last


def stored_weights(packed: Packed) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the stored weights that are not zero, some at a time: row * K + column, and value."""
    k, rows = packed.shape[1], panel_rows_of(packed.params)
    lane_columns = lane_columns_of(k)
    row_of = rows_of_panels(packed.shape[0], rows, is_paired(packed.params), packed.tensors["values"].device)
    for entries in decode(packed):
        values = packed.tensors["values"][entries.at]
        kept = values != 0
        panel, lane, position = entries.panel[kept], entries.lane[kept], entries.position[kept]
        row = row_of[panel * rows + position // lane_columns]
        yield row * k + position % lane_columns * LANES + lane, values[kept]

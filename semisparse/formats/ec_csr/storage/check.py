"""The checks that let kernels follow a file's lists: C++ on a CPU with a compiler, a kernel on a GPU, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, refuse_first, refuse_infinite
from semisparse.formats.ec_csr.cpu import kernel as cpu
from semisparse.formats.ec_csr.paper.check import check_paper
from semisparse.formats.ec_csr.storage import tiles
from semisparse.formats.ec_csr.storage.deltas import LANES, has_lists, has_tiles, refuse_repeats, widened
from semisparse.formats.ec_csr.storage.gpu import SPAN_LIMIT, check_gpu_params, span_limit_of
from semisparse.formats.ec_csr.storage.panels import (
    ROW_MULTIPLE,
    SEGMENTS,
    Entries,
    decode,
    is_paired,
    lane_columns_of,
    panel_rows_of,
    rows_of_panels,
    stored_weights,
    vector_of,
)
from semisparse.runtime import cpp


def check_content(packed: Packed) -> None:
    """Check every size, offset and delta, and that no weight is stored twice.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    if has_tiles(packed.params):
        check_gpu_params(packed.params)
        tiles.check(packed)
        refuse_infinite(tiles.unpack(packed), "tiles")
        if not has_lists(packed.params):
            return
    if has_lists(packed.params):
        _check_panels(packed)
    else:
        check_paper(packed)
    refuse_infinite(packed.tensors["values"], "values")


def violation(packed: Packed) -> str | None:
    """Say whether a weight that has passed `check_content` keeps more than its pattern allows; None if it does not.

    Only the number of weights is compared.
    """
    allowed = packed.pattern.kept(packed.shape) + packed.shape[0]  # as `Pattern.violation`: pruners round per row
    stored = packed.tensors.get("values")
    kept = int((tiles.unpack(packed) if stored is None else stored).count_nonzero())
    return f"{kept} weights are kept, {allowed} are allowed" if kept > allowed else None


def _check_panels(packed: Packed) -> None:
    """Check that each list stays in its panel, has its rows in order, and stores each weight once, at a column below K.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    check_gpu_params(packed.params)
    vector = vector_of(packed.dtype)
    positions = panel_rows_of(packed.params) * lane_columns_of(packed.shape[1])
    starts = packed.tensors["panel_loads"].long()
    stored = packed.tensors["values"].numel()
    if starts[0] != 0 or starts[-1] * LANES * vector != stored:
        ends = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor panel_loads runs from {ends}, expected 0 to {stored / (LANES * vector):g}")
    refuse_first(starts.diff() < 0, "panel_loads", "a panel begins before the one before it")
    bases = widened(packed.tensors["bases"])
    refuse_first(bases >= positions, "bases", f"the position is not below {positions}")
    first_loads = torch.arange(SEGMENTS + 1, device=starts.device) * starts.diff()[:, None] // SEGMENTS
    empty = (first_loads.diff() == 0).view(-1, 1)
    refuse_first(empty & (bases != 0), "bases", "the segment has no loads, expected 0")
    on_disk = bases.device.type == "cpu" and not is_paired(packed.params)
    if on_disk and cpp.refusal() is None:  # 1000 times as fast as torch, and loading waits for it
        span = cpu.check_lists(packed)
    else:
        from semisparse.formats.ec_csr.cuda import check_panels  # it imports this package

        on_gpu = check_panels.span_of(packed)
        if on_gpu is None:
            span = _check_lists(packed)
            refuse_repeats(position for position, _ in stored_weights(packed))
        else:
            span = on_gpu
    if packed.params.get("span") != span:
        raise FormatError(f"params: span is {packed.params.get('span')!r}, the lists have {span}")
    if span > span_limit_of(packed.params):
        raise FormatError(f"params: {SPAN_LIMIT} is {packed.params[SPAN_LIMIT]!r}, the lists have a span of {span}")


def _check_lists(packed: Packed) -> int:
    """Check every entry of every list as `cpu.check_lists` does, but do not look for weights that are stored twice.

    Returns:
        The span: the most rows that one segment of a list covers.
    Raises:
        FormatError: names the lane and the panel, and what is wrong.
    """
    (n, k), rows = packed.shape, panel_rows_of(packed.params)
    lane_columns = lane_columns_of(k)
    row_of = rows_of_panels(n, rows, is_paired(packed.params), packed.tensors["values"].device)
    span = 1
    for entries in decode(packed):
        position, weight = entries.position, packed.tensors["values"][entries.at] != 0
        row = position // lane_columns
        if len(row):
            span = max(span, 1 + int((row - entries.base // lane_columns).max()))
        crossed = row - (position - entries.delta) // lane_columns
        column = position % lane_columns * LANES + entries.lane
        between = entries.number % ROW_MULTIPLE != 0
        _refuse_entry(position >= rows * lane_columns, entries, cpu.LEAVES_PANEL)
        _refuse_entry(_goes_back(entries, rows * lane_columns, weight), entries, cpu.GOES_BACK)
        _refuse_entry(between & (crossed != 0), entries, cpu.ENDS_ROW)
        _refuse_entry(crossed > 1, entries, cpu.SKIPS_ROW)
        _refuse_entry(weight & (column >= k), entries, cpu.PAST_K.format(k=k))
        _refuse_entry(row_of[entries.panel * rows + row] == n, entries, cpu.PAST_N.format(n=n))
    return span


def _goes_back(entries: Entries, positions: int, weight: Tensor) -> Tensor:
    """Mark the first entries of segments whose base is below a weight of an earlier segment of the same list.

    In unpack.cu a segment ends at the base of the next.

    Args:
        positions: positions per lane and panel.
        weight: which entries are weights, bool.
    """
    begin = (entries.panel * LANES + entries.lane) * positions
    reached = torch.where(weight, begin + entries.position, begin).cummax(0).values
    before = torch.cat((reached.new_zeros(1), reached))[:-1]
    return entries.begins & (entries.base != 0) & (begin + entries.base < before)


def _refuse_entry(bad: Tensor, entries: Entries, what: str) -> None:
    if bad.any():
        at = int(bad.nonzero()[0])
        lane, panel = int(entries.lane[at]), int(entries.panel[at])
        raise FormatError(f"tensor deltas: the list of lane {lane} in panel {panel} {what}")

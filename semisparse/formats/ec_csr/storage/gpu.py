"""A weight on a GPU: row panels of a height that gives the SMs about equally many rows, mask tiles, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, Scalar, WeightSpec, choice_of, get_format
from semisparse.formats.ec_csr.storage import panels, tiles
from semisparse.formats.ec_csr.storage.deltas import (
    BOTH,
    LANES,
    LISTS,
    PANELS,
    PAPER,
    TILES,
    delta_bits_of,
    gpu_layout_of,
    has_lists,
    has_tiles,
    layout_of,
)
from semisparse.formats.ec_csr.storage.disk import unpack
from semisparse.formats.ec_csr.storage.panels import (
    DISK_PANEL_ROWS,
    PAIRED,
    PANEL_ROWS,
    is_paired,
    panel_rows_of,
    rows_of_panels,
    vector_of,
)
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import HOPPER

SPAN_LIMITS = (6, 8, 12, 16, 24, 32, 48, 64)
"""What spans are rounded up to, so that layers of one shape share their kernels. Random masks of 2,048 columns and more
have spans of 3 to 6 in panels of up to 32 rows."""

IMBALANCE = 1.03
"""Maximum rows on the busiest SM, relative to the least that any panel height reaches. `panel_rows_for` chooses among
the heights within it."""

DISK_ROWS, SPAN_LIMIT = "disk_panel_rows", "span_limit"
"""Params that row panels have on a GPU beside those on disk, with `PAIRED`."""

_GPU_PARAMS = (DISK_ROWS, SPAN_LIMIT, PAIRED, "units", "words_limit")


def arrange(packed: Packed, device_type: str) -> Packed:
    """Return the weight in the layout for a kind of device; its tensors stay on the device that they are on.

    Args:
        packed: as on disk, or as on a GPU.
        device_type: ``cuda`` for the GPU that holds the tensors, ``cpu`` for the layout on disk; for others nothing
            changes.
    """
    params = packed.params
    if layout_of(params) == PAPER or device_type not in ("cpu", "cuda"):
        return packed
    disk_rows = _disk_rows_of(params)
    if device_type == "cpu":
        is_gpus = DISK_ROWS in params or has_tiles(params)
        return _in_panels(packed, disk_rows, {}, _Dense(packed)) if is_gpus else packed
    if layout_of(params) == TILES or not _is_filled(packed):
        return packed
    wanted, weight = _wanted(packed.spec, device_facts(packed.device).capability), _Dense(packed)
    if wanted == TILES:
        return _with_tiles(packed, dict(params.without(*_GPU_PARAMS, "values", "span")), {}, TILES, weight)
    rows = panel_rows_for(packed.shape[0], device_facts(packed.device).sms)
    if DISK_ROWS in params and panel_rows_of(params) == rows:
        return packed
    # Panels of another height are packed again, then paired; others keep their tensors.
    lists = _in_panels(packed, rows, {DISK_ROWS: disk_rows, PAIRED: int(rows != disk_rows)}, weight)
    return lists if wanted == LISTS else _with_tiles(packed, dict(lists.params), lists.tensors, BOTH, weight)


class _Dense:
    """A packed weight's dense form, computed when it is first needed: by a kernel on a GPU, else by torch."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    @cached_property
    def weight(self) -> Tensor:
        """[N, K] in the weight's dtype."""
        packed = self._packed
        if packed.device.type != "cuda":
            return unpack(packed)
        if not has_lists(packed.params):
            weight = unpack(packed)
            k = weight.shape[1]
            return functional.pad(weight, (0, -k % LANES))[:, :k]  # as cuda/unpack.py, for pack_panels.cu
        # cuda/unpack.py imports this module.
        from semisparse.formats.ec_csr.cuda import unpack as kernel

        problem = Problem(1, get_format("ec_csr").structure(packed.spec), packed.dtype, packed.device)
        return unpack(packed) if kernel.refusal(problem) else kernel.prepare_unpack(problem)(packed)


def _wanted(spec: WeightSpec, capability: tuple[int, int]) -> str:
    """Return what row panels become on a GPU: `LISTS`, `TILES` or `BOTH`; tiles are for Hopper and 16 bits."""
    return gpu_layout_of(spec.params) if capability == HOPPER and spec.dtype in tiles.DTYPES else LISTS


def spec_on_gpu(spec: WeightSpec, capability: tuple[int, int]) -> WeightSpec:
    """Return a spec as on disk with the ``layout`` that `arrange` gives the weight on a GPU; other params stay."""
    if layout_of(spec.params) != PANELS:
        return spec
    wanted = _wanted(spec, capability)
    return replace(spec, params=Params({**spec.params, "layout": PANELS if wanted == LISTS else wanted}))


def to_tiles(packed: Packed) -> Packed:
    """Return a weight in row panels as mask tiles alone; its params name the panels of its file."""
    params = dict(packed.params.without(*_GPU_PARAMS, "values", "span"))
    return _with_tiles(packed, params, {}, TILES, _Dense(packed))


def _with_tiles(
    packed: Packed, params: dict[str, Scalar], lists: dict[str, Tensor], layout: str, dense: _Dense
) -> Packed:
    """Return a weight in mask tiles, beside the tensors ``lists``."""
    from semisparse.formats.ec_csr.cuda import pack_tiles  # it imports this package

    weight = dense.weight
    on_gpu = weight.device.type == "cuda" and pack_tiles.refusal(weight) is None
    stored, tensors = pack_tiles.pack(weight) if on_gpu else tiles.pack(weight)
    params |= {"layout": layout, DISK_ROWS: _disk_rows_of(packed.params), **stored}
    return packed.in_layout(params, lists | tensors)


def _in_panels(packed: Packed, rows: int, more: dict[str, int], dense: _Dense) -> Packed:
    """Return a weight in panels of ``rows`` rows, with ``more`` params; lists change only if their panels do."""
    params = {**packed.params.without(*_GPU_PARAMS), "layout": PANELS, "panel_rows": rows, **more}
    paired = bool(more.get(PAIRED))
    if has_lists(packed.params) and (rows, paired) == (panel_rows_of(packed.params), is_paired(packed.params)):
        tensors = panels.lists_of(packed)
    else:
        counted, tensors = _packed_panels(dense.weight, delta_bits_of(packed.params), rows, paired)
        params |= {name: counted[name] for name in ("values", "span")}
    if more:
        params[SPAN_LIMIT] = next(limit for limit in SPAN_LIMITS if limit >= int(params["span"]))
    return packed.in_layout(params, tensors)


def _packed_panels(
    weight: Tensor, delta_bits: int, rows: int, paired: bool
) -> tuple[Mapping[str, Scalar], dict[str, Tensor]]:
    """Return a weight in (paired) panels of ``rows`` rows: by a kernel on a GPU, else by torch, in the same bytes."""
    from semisparse.formats.ec_csr.cuda import pack_panels  # it imports this package

    if weight.device.type == "cuda" and pack_panels.refusal(weight) is None:
        return pack_panels.pack(weight, delta_bits, rows, paired)
    return panels.pack(paired_rows(weight, rows) if paired else weight, delta_bits, rows)


def paired_rows(weight: Tensor, rows: int) -> Tensor:
    """Return a weight's rows in the order of paired panels, zeros where a panel has no row."""
    n, k = weight.shape
    order = rows_of_panels(n, rows, True, weight.device)
    return torch.cat((weight, weight.new_zeros(1, k)))[order]


def panel_rows_for(n: int, sms: int) -> int:
    """Return the rows per panel of a weight with ``n`` rows for which the SMs of a GPU have about equally many rows.

    A weight of at most `DISK_PANEL_ROWS` rows per SM keeps panels of that height. Measured: on 132 SMs, 11,008 rows in
    panels of 32 are three panels for most SMs and two for others, and take 17.2 us; in panels of 28 they take 15.0 us.
    """
    if n <= sms * DISK_PANEL_ROWS:
        return DISK_PANEL_ROWS
    count = {rows: -(-n // rows) for rows in PANEL_ROWS}
    busiest = {rows: -(-count[rows] // sms) * rows for rows in PANEL_ROWS}
    even = [rows for rows in PANEL_ROWS if busiest[rows] <= IMBALANCE * min(busiest.values())]
    # At least two panels per SM, on all SMs but four: 8,192 rows are 256 panels of 32 rows, for 132 SMs.
    return max((rows for rows in even if count[rows] >= 2 * (sms - 4)), default=even[0])


def span_limit_of(params: Params) -> int:
    """Return an upper bound of the span, by which shared memory is sized.

    A weight that `arrange` has not seen may have any span, up to all rows of a panel.
    """
    return choice_of("ec_csr", params, SPAN_LIMIT, SPAN_LIMITS) if SPAN_LIMIT in params else panel_rows_of(params)


def check_gpu_params(params: Params) -> None:
    """Check the params of a weight on a GPU; those on disk have none.

    Raises:
        FormatError: one has a value that `arrange` never sets.
    """
    _disk_rows_of(params)
    gpu_layout_of(params)
    span_limit_of(params)
    if is_paired(params) and DISK_ROWS not in params:
        raise FormatError(f"params: {PAIRED} is 1 without {DISK_ROWS}, which a GPU's layout has")
    if has_tiles(params) and DISK_ROWS not in params:
        raise FormatError(f"params: layout is {layout_of(params)} without {DISK_ROWS}, which a GPU's layout has")


def _disk_rows_of(params: Params) -> int:
    return choice_of("ec_csr", params, DISK_ROWS, PANEL_ROWS) if DISK_ROWS in params else panel_rows_of(params)


def _is_filled(packed: Packed) -> bool:
    """Say whether the tensors hold lists: torch's ``to_empty`` allocates them before a state dict is loaded."""
    starts, loads = packed.tensors["panel_loads"], packed.tensors["values"].numel() // (LANES * vector_of(packed.dtype))
    return bool(starts[0] == 0) and bool(starts[-1] == loads) and bool((starts.diff() >= 0).all())

"""The plan of a weight for fours.cu: an order of columns in which every group of rows keeps at most two of four.

Rows are cut into tiles of 256, of eight *parts* of 32 rows; two parts are a *set*, what a warpgroup multiplies. A part lies in
one group, so it keeps a column or not. fit.cu puts the columns that a tile keeps in fours; those that the same sets need
come together in *blocks* of eight fours, and a set passes over the blocks that it does not need.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, TensorSpec
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.pack import columns_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin

ROWS = 256
"""Of a tile."""
PARTS, PART_ROWS = 8, 32
SETS = 4
FOURS = 8
"""Of a block."""
SLOTS = 2 * FOURS
"""That a part keeps of a block, at most."""
NONE = 65535
"""In the place of a slot."""

SPECS = (
    TensorSpec("starts", torch.int32, ("row_tiles+1",)),
    TensorSpec("columns", torch.int16, ("blocks", "block_columns")),
    TensorSpec("slots", torch.int16, ("blocks", "block_slots")),
    TensorSpec("records", torch.int32, ("blocks", "record")),
)

FIT_THREADS = 256

SOURCE = CudaSource(Path(__file__).with_name("fit.cu"))

SORTED = 0.45
"""Density from which on columns are placed in their own order: blocks and sets' shares of them are 1.06 and 1.06 times K at 16:32v32,
sorted 1.13 and 1.06; at 8:32v32 .91 and .75, sorted .91 and .57."""


def plan_of(packed: Packed) -> dict[str, Tensor]:
    """Make the plan's tensors, on the device of the weight's."""
    slot_of = _slots_of_parts(packed)
    tiles, _, width = slot_of.shape
    width -= 1
    kept = slot_of[..., :width] >= 0
    types = (kept << torch.arange(PARTS, device=kept.device)[:, None]).sum(1).to(torch.uint8)
    fours, counts = _fit(types, vectors_of(packed.pattern).density >= SORTED)
    columns, starts = _blocks(fours, counts, types)
    tile = torch.repeat_interleave(torch.arange(tiles, device=kept.device), starts.diff())
    slots, positions = _slots_and_positions(columns, tile, slot_of)
    needed = (slots >= 0).any(-1).unflatten(1, (SETS, -1)).any(-1)
    sets = (needed << torch.arange(SETS, device=kept.device)).sum(1, keepdim=True)
    records = F.pad(torch.cat([positions, sets], 1), (0, 16 - PARTS - 1))
    in_threads = slots.unflatten(1, (SETS, 2)).permute(0, 3, 2, 1).flatten(1)  # fours.cu reads them so
    by_row = columns.clamp(min=0).view(-1, 4, 8).transpose(1, 2).flatten(1)
    return {
        "starts": starts.to(torch.int32),
        "columns": by_row.to(torch.int16).contiguous(),
        "slots": in_threads.to(torch.int16).contiguous(),
        "records": records.to(torch.int32).contiguous(),
    }


def _slots_of_parts(packed: Packed) -> Tensor:
    """Give the slot of each column, [row_tiles, parts, columns + 1] int32; -1 for none, as for the last, which is no column."""
    vectors, (n, k) = vectors_of(packed.pattern), packed.shape
    columns = columns_of(packed)
    groups, total = columns.shape
    width = -(-k // vectors.window) * vectors.window
    slot_of = torch.full((groups + 1, width + 1), -1, dtype=torch.int32, device=columns.device)
    numbers = torch.arange(total, dtype=torch.int32, device=columns.device)
    slot_of[:groups].scatter_(1, columns, numbers.expand(groups, total))
    group = torch.arange(-(-n // ROWS) * PARTS, device=columns.device) * PART_ROWS // vectors.length
    return slot_of[group.clamp(max=groups)].unflatten(0, (-1, PARTS))


def _fit(types: Tensor, in_order: bool) -> tuple[Tensor, Tensor]:
    """Put columns in fours.

    Args:
        types: [row_tiles, columns] uint8, a bit for each part that keeps a column.
        in_order: whether columns are placed in their order, and not those first that more sets need.
    Returns:
        fours: [row_tiles, columns, 4] int32, -1 for none.
        counts: [row_tiles] int32, fours of each.
    """
    tiles, width = types.shape
    key = (types == 0).int() if in_order else _urgency(types)
    order = key.argsort(dim=1, stable=True).to(torch.int32)
    placed = types.gather(1, order.long())
    fours = torch.full((tiles, width, 4), -1, dtype=torch.int32, device=types.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=types.device)
    pointers = (order.data_ptr(), placed.data_ptr(), fours.data_ptr(), counts.data_ptr())
    _fit_kernel(types.device)(types.device, (tiles, 1, 1), FIT_THREADS, *pointers, width)
    return fours, counts


def _sets_of(types: Tensor) -> Tensor:
    """Give a bit for each set of which some part keeps a column."""
    either = types | types >> 1
    return sum((either >> 2 * i & 1) << i for i in range(SETS)).int()  # type: ignore[union-attr]


def _count(bits: Tensor, width: int) -> Tensor:
    return sum((bits >> i & 1).int() for i in range(width))  # type: ignore[return-value]


def _urgency(types: Tensor) -> Tensor:
    """Give what columns are sorted by: more sets first, the same sets together, more parts first; none at the end."""
    sets = _sets_of(types)
    return ((SETS - _count(sets, SETS)) * 16 + sets) * 16 + PARTS - _count(types, PARTS)


def _blocks(fours: Tensor, counts: Tensor, types: Tensor) -> tuple[Tensor, Tensor]:
    """Put fours that the same sets need side by side.

    Returns:
        columns: [blocks, 32] int64, -1 for none.
        starts: [row_tiles + 1] int64, blocks before each tile.
    """
    tiles, width, _ = fours.shape
    kept = types.gather(1, fours.clamp(min=0).flatten(1).long()).view_as(fours).masked_fill_(fours < 0, 0)
    sets = _sets_of(kept[..., 0] | kept[..., 1] | kept[..., 2] | kept[..., 3])
    order = ((SETS - _count(sets, SETS)) * 16 + sets).argsort(dim=1, stable=True)
    blocks = -(-counts.long() // FOURS)
    most = int(blocks.max()) * FOURS
    fours = F.pad(fours.gather(1, order[..., None].expand_as(fours)), (0, 0, 0, max(0, most - width)), value=-1)
    by_block = fours[:, :most].reshape(tiles, -1, 4 * FOURS)
    there = torch.arange(by_block.shape[1], device=blocks.device) < blocks[:, None]
    return by_block[there].long(), F.pad(blocks.cumsum(0), (1, 0))


def _slots_and_positions(columns: Tensor, tile: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    """Find what each part keeps of a block.

    Args:
        columns: [blocks, 32] int64, -1 for none.
        tile: [blocks], that a block belongs to.
        slot_of: [row_tiles, parts, all columns + 1] int32, -1 for none; the last for -1.
    Returns:
        slots: [blocks, parts, 16] int32, two of each four, -1 for none.
        positions: [blocks, parts] int64, 32 bits: two bits each, the places of the two in their four, the lower first.
    """
    part = torch.arange(PARTS, device=columns.device)[:, None]
    found = slot_of[tile[:, None, None], part, columns[:, None]].unflatten(2, (FOURS, 4))
    kept = found >= 0
    count = kept.sum(-1)
    first, last = kept.int().argmax(-1), 3 - kept.flip(-1).int().argmax(-1)
    # A four of which one is kept, or none, has a slot with no weight: at place 0, or at 1 where 0 is kept.
    lower = torch.where(count == 2, first, 0)
    upper = torch.where((count == 2) | ((count == 1) & (last > 0)), last, 1)
    slots = found.gather(-1, torch.stack([lower, upper], -1)).flatten(2)
    return slots, ((lower | upper << 2) << 4 * torch.arange(FOURS, device=columns.device)).sum(-1)


@cache
def _fit_kernel(device: torch.device) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, device_facts(device).arch, {})
    return CudaKernel(cubin, "semisparse_vector_nm_fit", (*[ctypes.c_void_p] * 4, ctypes.c_int))

"""The plan of a weight for fours.cu: an order of columns in which every group of rows keeps at most two of four.

Rows are cut into tiles of 256, of eight *parts* of 32 rows; two parts are a *set*, what a warpgroup multiplies. A part
lies in one group, so it keeps a column or not. fit.cu puts the columns that a tile keeps in fours; those that the same
sets need come together in *blocks* of eight fours, and a set passes over the blocks that it does not need.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, in_layout
from semisparse.formats.vector_nm import pack as stored
from semisparse.formats.vector_nm.layout import SPECS, TILE_ROWS, vectors_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin, unavailable

PARTS, PART_ROWS = 8, 32
SETS = TILE_ROWS // 64
LENGTHS = (32, 64, 128)
FOURS = 8
"""Of a block."""
SLOTS = 2 * FOURS
"""That a part keeps of a block, at most."""
NONE, UNNEEDED = 65535, 65534
"""In the place of a slot: its weights are zero, and nobody reads them."""

MOST_DENSITY = 0.3
"""Of a weight that gets a plan, which takes 0.4 bits a weight: at 12:32v32 unpacking for cuBLAS is as fast."""

FIT_THREADS = 256

SOURCE = CudaSource(Path(__file__).with_name("fit.cu"))

SOURCES = (SOURCE,)

SORTED = 0.45
"""Density from which on columns are placed in their own order.

Blocks, and sets' shares of them, are 1.04 and 1.04 times K / 32 at 16:32v32, sorted 1.19 and 1.04; .91 and .75 at
8:32v32, sorted .94 and .54 (K = 4,096).
"""


def refusal(packed: Packed) -> str | None:
    """Say why a weight gets no plan where it is, or None if it does."""
    vectors, device = vectors_of(packed.pattern), packed.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "plans are for Hopper (compute capability 9.0)"
    if packed.dtype not in (torch.float16, torch.bfloat16):
        return f"plans are for float16 and bfloat16, not {packed.dtype}"
    if vectors.length not in LENGTHS or vectors.density > MOST_DENSITY:
        return f"plans are for vectors of 32, 64 or 128 rows and densities up to {MOST_DENSITY}, not {vectors}"
    if packed.shape[1] + vectors.window > UNNEEDED:
        return f"plans are for fewer than {UNNEEDED - vectors.window} columns, not {packed.shape[1]}"
    return unavailable()


def arrange(packed: Packed, device_type: str) -> Packed:
    """Give the weight with a plan where kernels on such a device want one, else as on disk."""
    if device_type == "cuda" and refusal(packed) is None:
        return packed if "blocks" in packed.params else planned(packed)
    if "blocks" not in packed.params:
        return packed
    params = {name: value for name, value in packed.params.items() if name != "blocks"}
    return in_layout(packed, params, {spec.name: packed.tensors[spec.name] for spec in SPECS})


def planned(packed: Packed) -> Packed:
    """Add a plan to a weight."""
    tensors = plan_of(packed)
    return in_layout(packed, {**packed.params, "blocks": len(tensors["columns"])}, {**packed.tensors, **tensors})


def check_content(packed: Packed) -> None:
    """Check a weight as `pack.check_content` does, and its plan if it has one.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    stored.check_content(packed)
    if "blocks" in packed.params:
        check_plan(packed)


def check_plan(packed: Packed) -> None:
    """Check that a plan has every slot of every part once, beside the column that it belongs to.

    The positions have passed `pack.check_content`.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    starts, own = packed.tensors["starts"].long(), stored.columns_of(packed)
    groups, total = own.shape
    if starts[0] != 0 or (starts.diff() < 0).any() or starts[-1] != packed.params["blocks"]:
        raise FormatError(f"tensor starts: {starts.tolist()} do not rise from 0 to {packed.params['blocks']}")
    vectors = vectors_of(packed.pattern)
    columns = _unsigned(packed.tensors["columns"]).unflatten(1, (2, 16)).transpose(1, 2)
    if columns.max() >= -(-packed.shape[1] // vectors.window) * vectors.window:
        raise FormatError(f"tensor columns: {columns.max()} is past the last column")
    slots = _unsigned(packed.tensors["slots"]).unflatten(1, (SLOTS, PARTS)).transpose(1, 2)
    words, needed = packed.tensors["records"].long().unflatten(1, (PARTS, 2)).unbind(2)
    places = (words[..., None] >> 2 * torch.arange(SLOTS, device=words.device) & 3).unflatten(2, (FOURS, 2))
    if (places[..., 0] >= places[..., 1]).any():
        raise FormatError("tensor records: of two positions in a four the first is not the lower")
    part = torch.repeat_interleave(torch.arange(len(starts) - 1, device=words.device), starts.diff())[:, None] * PARTS
    part = part + torch.arange(PARTS, device=words.device)
    group = (part * PART_ROWS // vectors.length)[..., None]
    there = slots < UNNEEDED
    if ((group >= groups) & there).any() or slots[there].max() >= total:
        raise FormatError(f"tensor slots: a slot is not one of {groups} groups' {total}")
    found = columns.reshape(-1, 1, FOURS, 4).expand(-1, PARTS, -1, -1).gather(3, places).flatten(2)
    if (found != own[group.clamp(max=groups - 1), slots.clamp(max=total - 1)])[there].any():
        raise FormatError("tensor slots: a slot stands for another column than its own")
    parts = -(-groups * vectors.length // PART_ROWS)
    times = torch.bincount((part[..., None] * total + slots)[there], minlength=parts * total)
    if (times != 1).any():
        raise FormatError("tensor slots: a slot is not multiplied exactly once")
    wanted = there.any(-1).unflatten(1, (SETS, -1)).any(-1).repeat_interleave(PARTS // SETS, 1)
    if (needed != wanted).any() or ((slots == UNNEEDED) == wanted[..., None]).any():
        raise FormatError("tensor records: the sets that need a block are not those that have slots in it")


def _unsigned(numbers: Tensor) -> Tensor:
    return numbers.long() & 0xFFFF


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
    needed = (slots >= 0).any(-1).unflatten(1, (SETS, -1)).any(-1).repeat_interleave(PARTS // SETS, 1)
    slots = torch.where(needed[..., None], slots.masked_fill(slots < 0, NONE), UNNEEDED)
    by_row = columns.clamp(min=0).view(-1, 16, 2).transpose(1, 2).flatten(1)  # fours.cu reads them so
    return {
        "starts": starts.to(torch.int32),
        "columns": by_row.to(torch.int16).contiguous(),
        "slots": slots.transpose(1, 2).flatten(1).to(torch.int16).contiguous(),
        "records": torch.stack([positions, needed], 2).flatten(1).to(torch.int32).contiguous(),
    }


def _slots_of_parts(packed: Packed) -> Tensor:
    """Give the slot of each column, [row_tiles, parts, columns + 1] int32; -1 for none, as in the last place."""
    vectors, (n, k) = vectors_of(packed.pattern), packed.shape
    columns = stored.columns_of(packed)
    groups, total = columns.shape
    width = -(-k // vectors.window) * vectors.window
    slot_of = torch.full((groups + 1, width + 1), -1, dtype=torch.int32, device=columns.device)
    numbers = torch.arange(total, dtype=torch.int32, device=columns.device)
    slot_of[:groups].scatter_(1, columns, numbers.expand(groups, total))
    group = torch.arange(-(-n // TILE_ROWS) * PARTS, device=columns.device) * PART_ROWS // vectors.length
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

"""The layout on a Hopper GPU: beside the vectors, an order of the columns in which the weight is 2:4 (``sparse_mma``).

A *row tile* is 256 rows. It has eight *slices* of 32 rows, and two slices are the 64 rows of one wgmma. A slice lies in
one group, so it keeps a column or it does not. The columns that a row tile keeps are assigned to *quads*, of which no
slice keeps more than two (assign.cu). A *block* is eight quads: the K of one wgmma. Quads that the same 64-row tiles
need lie in the same blocks, because a 64-row tile skips the blocks of which it keeps nothing. README.md has a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, TensorSpec, WeightSpec, choice_of
from semisparse.formats.vector_nm.cuda.assign import assign_columns
from semisparse.formats.vector_nm.cuda.schedule import MAX_DENSITY, SPARSE_LENGTHS, SPARSE_TILE_N
from semisparse.formats.vector_nm.storage import disk
from semisparse.formats.vector_nm.storage.disk import columns_of, vectors_of
from semisparse.runtime.kernel import hopper_refusal

VECTORS, SPARSE_MMA = "vectors", "sparse_mma"
"""The layouts: as on disk, and with a column order."""

SLICES, SLICE_ROWS = SPARSE_TILE_N // 32, 32
MMA_TILES = SPARSE_TILE_N // 64
"""64-row tiles per row tile."""
BLOCK_QUADS = 8
BLOCK_SLOTS = 2 * BLOCK_QUADS
"""Maximum slots of a slice in a block."""
NO_SLOT, SKIPPED = 0xFFFF, 0xFFFE
"""What the tensor ``slots`` holds where there is no slot: in blocks that the 64-row tile multiplies (as a zero), and in
blocks that it skips."""

ORDERED_SPECS = (
    *(replace(spec, split_n=None, split_k=None) for spec in disk.SPECS),
    TensorSpec("block_starts", torch.int32, ("row_tiles+1",)),
    TensorSpec("columns", torch.int16, ("blocks", "block_columns")),
    TensorSpec("slots", torch.int16, ("blocks", "block_slots")),
    TensorSpec("metadata", torch.int32, ("blocks", "block_words")),
)


def layout_of(spec: WeightSpec) -> str:
    """Return the layout that a spec's params name; the one on disk if they name none.

    Raises:
        FormatError: they name an unknown one.
    """
    return choice_of("vector_nm", spec.params, "layout", (VECTORS, SPARSE_MMA), default=VECTORS)


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the tensors of a weight in its layout."""
    return ORDERED_SPECS if layout_of(spec) == SPARSE_MMA else disk.SPECS


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of these tensors."""
    sizes = disk.counts(spec)
    if layout_of(spec) == VECTORS:
        return sizes
    return {
        **sizes,
        "row_tiles": -(-spec.shape[0] // SPARSE_TILE_N),
        "blocks": int(spec.params["blocks"]),
        "block_columns": 4 * BLOCK_QUADS,
        "block_slots": BLOCK_SLOTS * SLICES,
        "block_words": 2 * SLICES,
    }


def order_refusal(spec: WeightSpec, device: torch.device) -> str | None:
    """Say why a weight gets no column order on a device, or None if it does."""
    vectors = vectors_of(spec.pattern)
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"orders float16 and bfloat16 weights, not {spec.dtype}"
    if vectors.length not in SPARSE_LENGTHS or vectors.density > MAX_DENSITY:
        return f"orders vectors of 32, 64 or 128 rows at densities up to {MAX_DENSITY}, not {vectors}"
    if spec.shape[1] + vectors.window > SKIPPED:
        return f"orders fewer than {SKIPPED - vectors.window} columns, not {spec.shape[1]}"
    return hopper_refusal(device)


def arrange(packed: Packed, device_type: str) -> Packed:
    """Return the weight with a column order where kernels on such a device want one, else as on disk."""
    ordered = layout_of(packed.spec) == SPARSE_MMA
    if device_type == "cuda" and order_refusal(packed.spec, packed.device) is None:
        return packed if ordered else with_order(packed)
    if not ordered:
        return packed
    tensors = {spec.name: packed.tensors[spec.name] for spec in disk.SPECS}
    return packed.in_layout(packed.params.without("layout", "blocks"), tensors)


def with_order(packed: Packed) -> Packed:
    """Add a column order to a weight."""
    slot_of = _slots_of_slices(packed)
    kept = slot_of[..., :-1] >= 0
    masks = (kept << torch.arange(SLICES, device=kept.device)[:, None]).sum(1).to(torch.uint8)
    order = _priority(masks).argsort(dim=1, stable=True).to(torch.int32)
    columns, starts = _blocks_of(*assign_columns(order, masks.gather(1, order.long())), masks)
    row_tile = torch.repeat_interleave(torch.arange(len(masks), device=kept.device), starts.diff())
    slots, metadata = _slots_and_metadata(columns, row_tile, slot_of)
    needed = needed_blocks(slots >= 0)
    slots = torch.where(needed[..., None], slots.masked_fill(slots < 0, NO_SLOT), SKIPPED)
    # Each lane of gemm_sparse.cu's producers copies columns of one parity.
    by_parity = columns.clamp(min=0).view(-1, 16, 2).transpose(1, 2).flatten(1)
    tensors = {
        "block_starts": starts.to(torch.int32),
        "columns": by_parity.to(torch.int16).contiguous(),
        "slots": slots.transpose(1, 2).flatten(1).to(torch.int16).contiguous(),
        "metadata": torch.stack([metadata, needed], 2).flatten(1).to(torch.int32).contiguous(),
    }
    params = {**packed.params, "layout": SPARSE_MMA, "blocks": len(columns)}
    return packed.in_layout(params, {**packed.tensors, **tensors})


def needed_blocks(stored: Tensor) -> Tensor:
    """Mark the blocks of which a slice's 64-row tile keeps something.

    Args:
        stored: [blocks, slices, 16] bool, whether the slice has that slot.
    Returns:
        [blocks, slices] bool.
    """
    return stored.any(-1).unflatten(1, (MMA_TILES, -1)).any(-1).repeat_interleave(SLICES // MMA_TILES, 1)


def _slots_of_slices(packed: Packed) -> Tensor:
    """Return the slot of each column in each slice, [row_tiles, slices, columns + 1] int32; -1: none.

    The last column is -1 throughout, so that column -1 has no slot.
    """
    vectors, (n, k) = vectors_of(packed.pattern), packed.shape
    columns = columns_of(packed)
    groups, total = columns.shape
    width = -(-k // vectors.window) * vectors.window
    slot_of = torch.full((groups + 1, width + 1), -1, dtype=torch.int32, device=columns.device)
    numbers = torch.arange(total, dtype=torch.int32, device=columns.device)
    slot_of[:groups].scatter_(1, columns, numbers.expand(groups, total))
    group = torch.arange(-(-n // SPARSE_TILE_N) * SLICES, device=columns.device) * SLICE_ROWS // vectors.length
    return slot_of[group.clamp(max=groups)].unflatten(0, (-1, SLICES))


def _mma_tiles_of(masks: Tensor) -> Tensor:
    """Return a bit for each 64-row tile of which some slice keeps a column, from a bit for each slice."""
    either = masks | masks >> 1
    return sum((either >> 2 * i & 1) << i for i in range(MMA_TILES)).int()  # type: ignore[union-attr]


def _count_bits(bits: Tensor, width: int) -> Tensor:
    return sum((bits >> i & 1).int() for i in range(width))  # type: ignore[return-value]


def _priority(masks: Tensor) -> Tensor:
    """Return the key that columns are sorted by before they are assigned to quads. ``masks`` has a bit per slice.

    Columns that more 64-row tiles keep come first, those of the same tiles together, and among these those that more
    slices keep. At 8:32v32 a row tile then has .94 K / 32 blocks, of which a 64-row tile multiplies .54 K / 32. With
    columns in their original order they are .91 and .75 (random weights, K = 4,096).
    """
    tiles = _mma_tiles_of(masks)
    return ((MMA_TILES - _count_bits(tiles, MMA_TILES)) * 16 + tiles) * 16 + SLICES - _count_bits(masks, SLICES)


def _blocks_of(quads: Tensor, quad_counts: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Put quads that the same 64-row tiles need into the same blocks.

    Args:
        quads: [row_tiles, columns, 4] int32, -1 for none.
        quad_counts: [row_tiles] int32.
        masks: [row_tiles, columns] uint8, a bit for each slice that keeps a column.
    Returns:
        columns: [blocks, 32] int64, -1 for none.
        starts: [row_tiles + 1] int64, the blocks before each row tile.
    """
    row_tiles, width, _ = quads.shape
    kept = masks.gather(1, quads.clamp(min=0).flatten(1).long()).view_as(quads).masked_fill_(quads < 0, 0)
    tiles = _mma_tiles_of(kept[..., 0] | kept[..., 1] | kept[..., 2] | kept[..., 3])
    order = ((MMA_TILES - _count_bits(tiles, MMA_TILES)) * 16 + tiles).argsort(dim=1, stable=True)
    blocks = -(-quad_counts.long() // BLOCK_QUADS)
    most = int(blocks.max()) * BLOCK_QUADS
    sorted_quads = quads.gather(1, order[..., None].expand_as(quads))
    sorted_quads = F.pad(sorted_quads, (0, 0, 0, max(0, most - width)), value=-1)
    columns = sorted_quads[:, :most].reshape(row_tiles, -1, 4 * BLOCK_QUADS)
    used = torch.arange(columns.shape[1], device=blocks.device) < blocks[:, None]
    return columns[used].long(), F.pad(blocks.cumsum(0), (1, 0))


def _slots_and_metadata(columns: Tensor, row_tile: Tensor, slot_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots and the 2:4 metadata of each slice in each block.

    Args:
        columns: [blocks, 32] int64, -1 for none.
        row_tile: [blocks], the row tile of each block.
        slot_of: [row_tiles, slices, all columns + 1] int32, -1 for none; the last column is for -1.
    Returns:
        slots: [blocks, slices, 16] int32, two of each quad, -1 for none.
        metadata: [blocks, slices] int64, 32 bits: two bits for each slot, its position in the quad, the lower first.
    """
    index = torch.arange(SLICES, device=columns.device)[:, None]
    slots_of_columns = slot_of[row_tile[:, None, None], index, columns[:, None]].unflatten(2, (BLOCK_QUADS, 4))
    kept = slots_of_columns >= 0
    count = kept.sum(-1)
    first, last = kept.int().argmax(-1), 3 - kept.flip(-1).int().argmax(-1)
    # If a slice keeps fewer than two columns of a quad, the empty slots take the lowest free positions.
    lower = torch.where(count == 2, first, 0)
    upper = torch.where((count == 2) | ((count == 1) & (last > 0)), last, 1)
    slots = slots_of_columns.gather(-1, torch.stack([lower, upper], -1)).flatten(2)
    return slots, ((lower | upper << 2) << 4 * torch.arange(BLOCK_QUADS, device=columns.device)).sum(-1)

"""Validation of the stored tensors. A checkpoint is untrusted, so everything that kernels assume is checked."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, refuse_first, refuse_infinite
from semisparse.formats.vector_nm.storage import gpu
from semisparse.formats.vector_nm.storage.disk import columns_of, vectors_of


def check_content(packed: Packed) -> None:
    """Check the vectors and, in the layout ``sparse_mma``, the tensors of its column order.

    Raises:
        FormatError: names the tensor and the error; for vectors the index too.
    """
    check_vectors(packed)
    if gpu.layout_of(packed.spec) == gpu.SPARSE_MMA:
        check_order(packed)


def check_vectors(packed: Packed) -> None:
    """Check the kept vectors: a slot is one of them, a group the LENGTH rows that share positions.

    Values must be finite, and zero in rows from N and columns from K on. Positions must rise strictly within a window,
    and be below its size.

    Raises:
        FormatError: names the tensor, the group and the slot, and the error.
    """
    vectors = vectors_of(packed.pattern)
    n, k = packed.shape
    values, positions = packed.tensors["values"], packed.tensors["positions"]
    refuse_infinite(values, "values")
    if int(positions.max()) >= vectors.window:
        outside = positions > vectors.window - 1  # `>= window` would cast 256 to uint8
        refuse_first(outside, "positions", f"not below the window size {vectors.window}")
    same_window = torch.arange(1, positions.shape[1], device=positions.device) % vectors.keep != 0
    backwards = (positions[:, 1:] <= positions[:, :-1]) & same_window
    refuse_first(backwards, "positions", "not above the position before it in its window", (0, 1))
    # Only the last window can extend past K, and only the last group past N: only these are checked.
    last = values.shape[1] - vectors.keep
    past_k = (columns_of(packed)[:, last:] >= k)[..., None] & (values[:, last:] != 0)
    refuse_first(past_k, "values", f"a weight in a column from K = {k} on is not zero", (0, last, 0))
    rows = values.shape[2] - (-n % values.shape[2])
    past_n = values[-1:, :, rows:] != 0
    refuse_first(past_n, "values", f"a weight in a row from N = {n} on is not zero", (len(values) - 1, 0, rows))


def check_order(packed: Packed) -> None:
    """Check the tensors of the column order: each slot of each slice of `SLICE_ROWS` rows stands in one block, once.

    The column that ``columns`` and ``metadata`` select for a slot must be the one that ``positions`` gives it. Call
    `check_vectors` first.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    tensors, blocks = packed.tensors, packed.params["blocks"]
    starts, slot_columns = tensors["block_starts"].long(), columns_of(packed)
    groups, total = slot_columns.shape
    if starts[0] != 0 or (starts.diff() < 1).any() or starts[-1] != blocks:
        raise FormatError(f"tensor block_starts: does not rise strictly from 0 to {blocks}, the number of blocks")
    columns = _unsigned(tensors["columns"]).unflatten(1, (2, 16)).transpose(1, 2)
    vectors = vectors_of(packed.pattern)
    end = -(-packed.shape[1] // vectors.window) * vectors.window
    if columns.max() >= end:
        raise FormatError(f"tensor columns: {columns.max()} is not below {end}, K in whole windows")
    slots = _unsigned(tensors["slots"]).unflatten(1, (gpu.BLOCK_SLOTS, gpu.SLICES)).transpose(1, 2)
    words, needed = tensors["metadata"].long().unflatten(1, (gpu.SLICES, 2)).unbind(2)
    shifts = 2 * torch.arange(gpu.BLOCK_SLOTS, device=words.device)
    in_quad = (words[..., None] >> shifts & 3).unflatten(2, (gpu.BLOCK_QUADS, 2))
    if (in_quad[..., 0] >= in_quad[..., 1]).any():
        raise FormatError("tensor metadata: the two indices of a 2:4 group do not rise")

    row_tile = torch.repeat_interleave(torch.arange(len(starts) - 1, device=words.device), starts.diff())
    index = row_tile[:, None] * gpu.SLICES + torch.arange(gpu.SLICES, device=words.device)
    group = (index * gpu.SLICE_ROWS // vectors.length)[..., None]
    stored = slots < gpu.SKIPPED
    if (stored & ((group >= groups) | (slots >= total))).any():
        raise FormatError(f"tensor slots: a slot is out of range; there are {groups} groups of {total} slots")
    ordered = columns.reshape(-1, 1, gpu.BLOCK_QUADS, 4).expand(-1, gpu.SLICES, -1, -1)
    multiplied = ordered.gather(3, in_quad).flatten(2)
    if (multiplied != slot_columns[group.clamp(max=groups - 1), slots.clamp(max=total - 1)])[stored].any():
        raise FormatError("tensor slots: the column that columns and metadata select is not the slot's in positions")
    slices = -(-groups * vectors.length // gpu.SLICE_ROWS)
    times = torch.bincount((index[..., None] * total + slots)[stored], minlength=slices * total)
    if (times != 1).any():
        raise FormatError("tensor slots: a slot is missing or repeated")
    expected = gpu.needed_blocks(stored)
    if (needed != expected).any():
        raise FormatError("tensor metadata: the tiles marked as needing a block are not those with slots in it")
    if ((slots == gpu.SKIPPED) == expected[..., None]).any():
        raise FormatError("tensor slots: slots are marked as skipped where the tile needs the block, or the reverse")


def _unsigned(numbers: Tensor) -> Tensor:
    return numbers.long() & 0xFFFF

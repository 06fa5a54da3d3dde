"""Checks of stored tensors: a checkpoint is an untrusted file, and kernels follow its masks and starts."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage import gpu
from semisparse.formats.bitmask.storage.disk import BLOCK, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.bits import bit_counts
from semisparse.formats.checks import refuse_first


def check_content(packed: Packed) -> None:
    """Check every mask's bit count, every row's start, and that no weight lies in padding or past column K.

    Raises:
        FormatError: names the tensor, the row and what is wrong.
    """
    if layout_of(packed.params) == "tiles":
        _check_padding(packed)
        packed = gpu.to_rows(packed)
    masks = packed.tensors["masks"]
    bits = bit_counts(masks)
    beyond = bit_counts(masks[:, -1] & _mask_beyond(packed.shape[1]))
    count = values_per_block(packed.pattern)
    if count is None:
        _check_row_starts(packed, bits.sum(1))
        refuse_first(beyond != 0, "masks", f"the last mask has bits past column K = {packed.shape[1]}")
        return
    refuse_first(bits != count, "masks", f"a mask has not exactly {count} bits, as pattern {packed.pattern} requires")
    if packed.shape[1] % BLOCK == 0:
        return
    slot = torch.arange(count, device=masks.device)
    past_k = slot >= count - beyond[:, None]
    tail = packed.tensors["values"][:, -count:]
    refuse_first(past_k & (tail != 0), "values", f"a weight past column K = {packed.shape[1]} is not zero")


def _check_row_starts(packed: Packed, bits_of_rows: Tensor) -> None:
    starts = packed.tensors["row_starts"]
    kept = packed.tensors["values"].numel()
    if starts[0] != 0 or starts[-1] != kept:
        found = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor row_starts runs from {found}, expected 0 to {kept}, the number of values")
    refuse_first(starts.diff() != bits_of_rows, "row_starts", "a row's length is not the bit count of its masks")


def _check_padding(packed: Packed) -> None:
    """Check that rows and blocks of padding hold zeros at the lowest columns, and odd pairs end in a zero."""
    n, k = packed.shape
    masks, values, after = gpu.padded_rows(packed)
    padding = torch.ones_like(masks, dtype=torch.bool)
    padding[:n, : -(-k // BLOCK)] = False
    empty = gpu.padding_mask(values.shape[-1])
    filled = padding & ((masks != empty) | (values != 0).any(-1))
    if filled.any():
        raise FormatError(f"tensor tiles: the padding at row, block {filled.nonzero()[0].tolist()} is not empty")
    if after.view(torch.int16).any():
        raise FormatError(f"tensor tiles: a lane holds more than {values.shape[-1]} values per row")


def _mask_beyond(k: int) -> int:
    """Return, as a signed 64-bit number, the mask of the last block's columns from K on."""
    inside = (k - 1) % BLOCK + 1
    return -1 << inside if inside < BLOCK else 0

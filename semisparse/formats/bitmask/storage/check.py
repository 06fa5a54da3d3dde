"""Checks of stored tensors: a checkpoint is an untrusted file, and kernels follow its masks and starts."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage import gpu
from semisparse.formats.bitmask.storage.disk import BLOCK, bits_of, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.bits import bit_counts
from semisparse.formats.checks import refuse_first, refuse_infinite, share_violation
from semisparse.patterns import NM, VectorNM


def check_content(packed: Packed) -> None:
    """Check every mask's bit count, every row's start, and that no weight lies in padding or past column K.

    Raises:
        FormatError: names the tensor, the row and what is wrong.
    """
    if layout_of(packed.params) == "tiles":
        _check_padding(packed)
        packed = gpu.to_rows(packed)
    masks = packed.tensors["masks"]
    refuse_infinite(packed.tensors["values"], "values")
    bits = bit_counts(masks)
    beyond = bit_counts(masks[:, -1] & _mask_beyond(packed.shape[1]))
    count = values_per_block(packed.pattern)
    if count is None:
        _check_row_starts(packed, bits.sum(1))
        refuse_first(beyond != 0, "masks", f"the last mask has bits past column K = {packed.shape[1]}")
        return
    refuse_first(bits != count, "masks", f"a mask has not exactly {count} bits, as pattern {packed.pattern} requires")
    if packed.shape[1] % BLOCK:
        slot = torch.arange(count, device=masks.device)
        past_k = slot >= count - beyond[:, None]
        tail = packed.tensors["values"][:, -count:]
        refuse_first(past_k & (tail != 0), "values", f"a weight past column K = {packed.shape[1]} is not zero")


def violation(packed: Packed) -> str | None:
    """Describe the first place where a weight that has passed `check_content` breaks its pattern, or return None.

    A mask may have more bits in a window than the pattern keeps, because blocks with fewer weights are filled up with
    zeros. So only the weights of rows with such windows are looked at: most weights have none.
    """
    if layout_of(packed.params) == "tiles":
        packed = gpu.to_rows(packed)
    pattern, masks = packed.pattern, packed.tensors["masks"]
    if values_per_block(pattern) is None:
        return share_violation(packed, packed.tensors["row_starts"].diff())
    if not isinstance(pattern, NM | VectorNM) or pattern.window in (1, BLOCK) or pattern.keep == pattern.window:
        return None  # the number of bits of a mask has been checked
    rows = _has_fuller_window(masks, pattern.window, pattern.keep).any(1).nonzero().flatten()
    if not len(rows):
        return None
    stored = bits_of(masks[rows])
    weights = torch.zeros(stored.shape, dtype=torch.bool, device=masks.device)
    weights.masked_scatter_(stored, packed.tensors["values"][rows] != 0)
    kept = weights.flatten(1).unflatten(1, (-1, pattern.window)).sum(-1)
    bad = (kept > pattern.keep).any(1)
    return f"a window of row {int(rows[bad][0])} keeps more than {pattern.keep}" if bad.any() else None


def _has_fuller_window(masks: Tensor, window: int, keep: int) -> Tensor:
    """Return which masks have more than ``keep`` bits in one of their windows, a power of two: [N, blocks] bool."""
    counts, width = masks, 1  # counts of bits in fields of `width` bits, all fields of a mask at once
    while width < window:
        low = _fields(2 * width, 2**width - 1)
        counts = (counts & low) + (counts >> width & low)
        width *= 2
    # A field's highest bit becomes 1 where the count is above `keep`.
    return (counts + _fields(window, 2 ** (window - 1) - 1 - keep) & _fields(window, 2 ** (window - 1))) != 0


def _fields(width: int, value: int) -> int:
    """Return a signed 64-bit number with ``value`` in each field of ``width`` bits."""
    bits = sum(value << first for first in range(0, BLOCK, width))
    return bits - (bits >> 63 << 64)


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

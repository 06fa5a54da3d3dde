"""Checks of stored tensors: a checkpoint is an untrusted file; kernels compute addresses from masks and row starts."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, refuse_first, refuse_infinite, share_violation
from semisparse.formats.bitmask.storage import gpu, gpu_bytes, gpu_nibbles
from semisparse.formats.bitmask.storage.codes import code_bits, entries_of, middle_code, unusable
from semisparse.formats.bitmask.storage.disk import BLOCK, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.patterns import NM, VectorNM
from semisparse.runtime.bits import bit_counts, bits_of


def check_content(packed: Packed) -> None:
    """Check mask bit counts, row starts, scales, that values are finite, and that padding and columns from K are zero.

    Raises:
        FormatError: names the tensor, the row and what is wrong.
    """
    if layout_of(packed.params) == "tiles":
        _check_padding(packed)
        packed = gpu.to_rows(packed)
    masks, bits = packed.tensors["masks"], code_bits(packed.params)
    stored = bit_counts(masks)
    beyond = bit_counts(masks[:, -1] & _mask_beyond(packed.shape[1]))
    count = values_per_block(packed.pattern)
    if count is None:
        _check_row_starts(packed, entries_of(stored, bits).sum(1))
        refuse_first(beyond != 0, "masks", f"the last mask has bits past column K = {packed.shape[1]}")
    else:
        what = f"a mask does not have exactly {count} bits, as pattern {packed.pattern} requires"
        refuse_first(stored != count, "masks", what)
    if bits:
        _check_codes(packed, stored)
    else:
        refuse_infinite(packed.tensors["values"], "values")
    if count is not None and packed.shape[1] % BLOCK:
        slot = torch.arange(count, device=masks.device)
        past_k = slot >= count - beyond[:, None]
        name, tail = _last_block(packed, count)
        refuse_first(past_k & (tail != 0), name, f"a weight past column K = {packed.shape[1]} is not zero")


def _check_codes(packed: Packed, counts: Tensor) -> None:
    """Check the scales, and that a zero follows an odd number of 4-bit codes.

    Args:
        packed: of kind ``w8`` or ``w4``, in rows; masks and row starts have been checked.
        counts: codes per block, [N, blocks].
    """
    bits, codes = code_bits(packed.params), packed.tensors["codes"].flatten()
    refuse_first(unusable(packed.tensors["scale"], bits), "scale", "the scale is 0, or a weight would not be finite")
    if bits == 4:
        ends = entries_of(counts.flatten(), bits).cumsum(0)
        filled = counts.flatten() % 2 == 1
        filled[filled.clone()] = codes[ends[filled] - 1] >> 4 != 0
        refuse_first(filled.view(counts.shape), "codes", "the four bits after the last code of this block are not 0")


def _last_block(packed: Packed, count: int) -> tuple[str, Tensor]:
    """Return the tensor's name and the last block's stored values, [N, count]; codes less the code of zero."""
    bits = code_bits(packed.params)
    if not bits:
        return "values", packed.tensors["values"][:, -count:]
    octets = packed.tensors["codes"][:, -entries_of(count, bits) :]
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1)[:, :count] if bits == 4 else octets
    return "codes", codes.to(torch.int16) - middle_code(bits)


def violation(packed: Packed) -> str | None:
    """Describe the first place where a weight that has passed `check_content` breaks its pattern, or return None.

    A mask may have more bits in a window than the pattern keeps, because blocks with fewer non-zeros are filled up with
    zeros. Only rows with such a window are unpacked: most weights have no such row.
    """
    if layout_of(packed.params) == "tiles":
        packed = gpu.to_rows(packed)
    pattern, masks = packed.pattern, packed.tensors["masks"]
    if values_per_block(pattern) is None:
        return share_violation(packed, bit_counts(masks).sum(1))
    if code_bits(packed.params):
        return pattern.violation(packed.unpack() != 0)
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


def _check_row_starts(packed: Packed, lengths: Tensor) -> None:
    """Check that each row has as many values, or bytes of codes, as its masks say: ``lengths``, [N] int64."""
    starts = packed.tensors["row_starts"]
    kept = int(packed.params["kept"])
    if starts[0] != 0 or starts[-1] != kept:
        ends = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor row_starts runs from {ends}, expected 0 to {kept}, the number of values")
    refuse_first(starts.diff() != lengths, "row_starts", "a row's length does not agree with the bits of its masks")


def _check_padding(packed: Packed) -> None:
    """Check that padding rows and blocks hold zeros at their lowest columns and scale 1, and unused bytes are zero."""
    n, k = packed.shape
    keep, bits = gpu.tiling(packed.spec).keep, code_bits(packed.params)
    masks = after = None
    if bits == 4:
        codes, scale = gpu_nibbles.padded_rows(packed)
        filled = (codes != middle_code(bits)).any(-1) | (scale != 1)
        too_many = (codes != middle_code(bits)).sum(-1) > keep
        refuse_first(too_many, "tiles", f"a row has more than {keep} weights in {BLOCK} columns")
    elif bits:
        masks, codes, scale, after = gpu_bytes.padded_rows(packed, keep)
        filled = (codes != middle_code(bits)).any(-1) | (scale != 1)
    else:
        masks, values, after = gpu.padded_rows(packed)
        filled, after = (values != 0).any(-1), after.view(torch.int16)
    if masks is not None:
        filled |= masks != gpu.padding_mask(keep)
    filled[:n, : -(-k // BLOCK)] = False
    if filled.any():
        raise FormatError(f"tensor tiles: the padding at row, block {filled.nonzero()[0].tolist()} is not empty")
    if after is not None and after.any():
        raise FormatError(f"tensor tiles: a lane holds more than {keep} values per row")


def _mask_beyond(k: int) -> int:
    """Return, as a signed 64-bit number, the mask of the last block's columns from K on."""
    inside = (k - 1) % BLOCK + 1
    return -1 << inside if inside < BLOCK else 0

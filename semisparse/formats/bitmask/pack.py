"""Weights to masks and values, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.bits import bit_counts
from semisparse.formats.checks import refuse_first
from semisparse.patterns import NM, Pattern, VectorNM
from semisparse.patterns.base import blocks_along

BLOCK = 64
"""Columns of one mask."""


def values_per_block(pattern: Pattern) -> int | None:
    """Give the exact count that ``pattern`` lets every 64 columns store, or None if it bounds no such block."""
    if isinstance(pattern, NM | VectorNM) and BLOCK % pattern.window == 0:
        return pattern.keep * (BLOCK // pattern.window)
    return None


def pack_weight(weight: Tensor, pattern: Pattern) -> tuple[Params, dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K], obeying ``pattern``) beside one bit a column; -0.0 counts as zero.

    Returns:
        params: ``kept``, the number of stored values, in the variable layout; nothing in the exact one.
        tensors: as FORMAT declares them.
    """
    blocks = blocks_along(weight, BLOCK, dim=1)
    stored = blocks != 0
    count = values_per_block(pattern)
    if count is not None:
        stored |= _lowest_dead(stored, count)
        values = blocks.masked_select(stored).view(weight.shape[0], -1)
        # A dead position may hold -0.0; adding +0.0 makes it +0.0 and changes nothing else.
        return {}, {"masks": masks_of(stored), "values": values + 0.0}
    values = blocks.masked_select(stored)
    row_starts = torch.zeros(weight.shape[0] + 1, dtype=torch.int64, device=weight.device)
    torch.cumsum(stored.sum((1, 2)), 0, out=row_starts[1:])
    return {"kept": len(values)}, {"masks": masks_of(stored), "values": values, "row_starts": row_starts}


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    n, k = packed.shape
    stored = bits_of(packed.tensors["masks"])
    blocks = torch.zeros(stored.shape, dtype=packed.dtype, device=stored.device)
    blocks.masked_scatter_(stored, packed.tensors["values"])
    return blocks.view(n, -1)[:, :k].contiguous()


def check_content(packed: Packed) -> None:
    """Check every mask's bit count, every row's start, and that no weight stands past column K.

    Raises:
        FormatError: names the tensor, the row and what is wrong.
    """
    masks = packed.tensors["masks"]
    bits = bit_counts(masks)
    beyond = bit_counts(masks[:, -1] & _mask_beyond(packed.shape[1]))
    count = values_per_block(packed.pattern)
    if count is None:
        _check_rows(packed, bits.sum(1))
        refuse_first(beyond != 0, "masks", f"the last mask has bits past column K = {packed.shape[1]}")
        return
    refuse_first(bits != count, "masks", f"a mask has not exactly {count} bits, as pattern {packed.pattern} asks")
    if packed.shape[1] % BLOCK == 0:
        return
    slot = torch.arange(count, device=masks.device)
    past_k = slot >= count - beyond[:, None]
    tail = packed.tensors["values"][:, -count:]
    refuse_first(past_k & (tail != 0), "values", f"a weight past column K = {packed.shape[1]} is not zero")


def _check_rows(packed: Packed, bits_of_rows: Tensor) -> None:
    starts = packed.tensors["row_starts"]
    kept = packed.tensors["values"].numel()
    if starts[0] != 0 or starts[-1] != kept:
        found = f"{int(starts[0])} to {int(starts[-1])}"
        raise FormatError(f"tensor row_starts runs from {found}, expected 0 to {kept}, the number of values")
    refuse_first(starts.diff() != bits_of_rows, "row_starts", "a row's length is not the bit count of its masks")


def _lowest_dead(stored: Tensor, count: int) -> Tensor:
    """Mark, in each block, as many of the lowest unstored positions as are missing to ``count``."""
    missing = count - stored.sum(-1, keepdim=True, dtype=torch.int8)
    dead = ~stored
    return dead & (dead.cumsum(-1, dtype=torch.int8) <= missing)


def masks_of(stored: Tensor) -> Tensor:
    """Gather bits, [N, blocks, 64] bool, into int64 masks [N, blocks]; bit i is column i of its block."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=stored.device)
    octets = (stored.unflatten(-1, (8, 8)) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64).squeeze(-1)


def bits_of(masks: Tensor) -> Tensor:
    """Spread masks [N, blocks] into bits, [N, blocks, 64] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    octets = masks.contiguous().unsqueeze(-1).view(torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)


def _mask_beyond(k: int) -> int:
    """Give, as a signed 64-bit number, the mask of the last block's columns from K on."""
    inside = (k - 1) % BLOCK + 1
    return -1 << inside if inside < BLOCK else 0

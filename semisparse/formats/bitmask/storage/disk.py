"""The layout on disk, ``rows``: a 64-bit mask per row and 64 columns, and the stored values in column order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.formats.base import Packed, TensorSpec, WeightSpec
from semisparse.patterns import NM, Pattern, VectorNM
from semisparse.patterns.base import blocks_along

BLOCK = 64
"""Columns per mask."""

EXACT = (
    TensorSpec("masks", torch.int64, ("N", "blocks"), split_n=0, split_k=1),
    TensorSpec("values", None, ("N", "slots"), split_n=0, split_k=1),
)
VARIABLE = (
    TensorSpec("masks", torch.int64, ("N", "blocks")),
    TensorSpec("values", None, ("kept",)),
    TensorSpec("row_starts", torch.int64, ("N+1",)),
)


def values_per_block(pattern: Pattern) -> int | None:
    """Return how many values each 64 columns store, or None if ``pattern`` does not bound that number."""
    if isinstance(pattern, NM | VectorNM) and BLOCK % pattern.window == 0:
        return pattern.keep * (BLOCK // pattern.window)
    return None


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return VARIABLE if values_per_block(spec.pattern) is None else EXACT


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    blocks = -(-spec.shape[1] // BLOCK)
    count = values_per_block(spec.pattern)
    if count is None:
        return {"blocks": blocks, "kept": int(spec.params["kept"])}
    return {"blocks": blocks, "slots": blocks * count}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns at whose multiples the exact layout may be cut."""
    return 1, BLOCK


def pack(weight: Tensor, pattern: Pattern) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Store the non-zeros of a weight and one bit per column; -0.0 counts as zero.

    Args:
        weight: [N, K], obeying ``pattern``.
        pattern: decides between the exact and the variable layout.
    Returns:
        params: ``kept``, the number of stored values, in the variable layout; nothing in the exact one.
        tensors: by name.
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
    """Return the dense weight, [N, K] in its dtype."""
    n, k = packed.shape
    stored = bits_of(packed.tensors["masks"])
    blocks = torch.zeros(stored.shape, dtype=packed.dtype, device=stored.device)
    blocks.masked_scatter_(stored, packed.tensors["values"])
    return blocks.flatten(1)[:n, :k].contiguous()


def _lowest_dead(stored: Tensor, count: int) -> Tensor:
    """Mark, in each block, as many of the lowest unstored positions as are missing to ``count``."""
    missing = count - stored.sum(-1, keepdim=True, dtype=torch.int8)
    dead = ~stored
    return dead & (dead.cumsum(-1, dtype=torch.int8) <= missing)


def masks_of(stored: Tensor) -> Tensor:
    """Pack bits, [N, blocks, 64] bool, into int64 masks [N, blocks]; bit i is column i of its block."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=stored.device)
    octets = (stored.unflatten(-1, (8, 8)) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64).squeeze(-1)


def bits_of(masks: Tensor) -> Tensor:
    """Unpack masks [N, blocks] into bits, [N, blocks, 64] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    octets = masks.contiguous().unsqueeze(-1).view(torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)

"""Chunks of 16 rows by 4 groups: the 64-bit masks of their kept groups, and the kept groups in the masks' order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ROWS, CHUNK_GROUPS = 16, 4
"""Bit 4 r + g of a chunk's mask is group g of row r."""


def chunked(x: Tensor) -> Tensor:
    """Cut [N, groups, n] into zero-padded chunks, [row tiles, column tiles, 64, n], in the order of the mask bits."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % CHUNK_GROUPS, 0, -x.shape[0] % CHUNK_ROWS))
    return x.unflatten(1, (-1, CHUNK_GROUPS)).unflatten(0, (-1, CHUNK_ROWS)).transpose(1, 2).flatten(2, 3)


def unchunked(x: Tensor) -> Tensor:
    """Undo `chunked`, but keep its padding: [row tiles, column tiles, 64, n] to [rows, groups, n]."""
    return x.unflatten(2, (CHUNK_ROWS, CHUNK_GROUPS)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def masks_of(kept: Tensor) -> Tensor:
    """Return the mask of each chunk, [row tiles, column tiles] int64, from the kept groups, [N, groups] bool."""
    octets = chunked(kept[..., None]).squeeze(-1).unflatten(-1, (8, 8)).to(torch.uint8)
    bit_values = 1 << torch.arange(8, dtype=torch.uint8, device=kept.device)
    return (octets * bit_values).sum(-1, dtype=torch.uint8).contiguous().view(torch.int64).squeeze(-1)


def starts_of(bits: Tensor) -> Tensor:
    """Count the kept groups before each chunk, and in total: [chunks + 1] int32."""
    return F.pad(bits.sum(-1).flatten().cumsum(0), (1, 0)).to(torch.int32)


def in_mask_order(x: Tensor, bits: Tensor) -> Tensor:
    """Select the kept groups of [N, groups] or [N, groups, n] in the order of the masks' bits."""
    return chunked(x)[bits] if x.dim() == 3 else chunked(x[..., None])[bits].squeeze(-1)

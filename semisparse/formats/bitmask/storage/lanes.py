"""How the layout ``tiles`` divides 16 rows by 256 columns among a warp's lanes, as ``mma.m16n8k16`` does fragments.

Lane 4 g + t owns block t (64 columns) of rows g and g + 8, so it finds its weights without a shuffle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.bitmask.storage.disk import BLOCK

ROWS, COLUMNS = 16, 256
"""Rows and columns per tile."""

BLOCKS = COLUMNS // BLOCK
"""Masks per row of a tile."""

LANES = 32


def pad_to_tiles(blocks: Tensor) -> Tensor:
    """Pad [N, blocks, entries] with zeros to whole tiles."""
    return F.pad(blocks, (0, 0, 0, -blocks.shape[1] % BLOCKS, 0, -blocks.shape[0] % ROWS))


def by_lane(words: Tensor) -> Tensor:
    """Join the rows of a lane: [padded N, padded blocks, words] to [row tiles, column tiles, 32, 2 * words]."""
    tiles = words.unflatten(1, (-1, BLOCKS)).unflatten(0, (-1, 2, ROWS // 2))  # row tile, half, g, column tile, t, word
    return tiles.permute(0, 3, 2, 4, 1, 5).flatten(4).flatten(2, 3)


def by_row(lanes: Tensor) -> Tensor:
    """Invert `by_lane`."""
    tiles = lanes.unflatten(-1, (2, -1)).unflatten(2, (ROWS // 2, BLOCKS))  # row tile, column tile, g, t, half, word
    words = tiles.permute(0, 4, 2, 1, 3, 5).flatten(3, 4).flatten(0, 2)
    return words.clone(memory_format=torch.contiguous_format)  # one word per lane may have any stride otherwise


def scale_words(scale: Tensor) -> Tensor:
    """Return the scales of tiles, [row tiles, column tiles, 32] int32: row g's in the low half of a lane's word.

    Args:
        scale: [N, blocks] in 16 bits; padded with 1.
    """
    n, blocks = scale.shape
    padded = scale.new_ones(n + -n % ROWS, blocks + -blocks % BLOCKS, 1)
    padded[:n, :blocks, 0] = scale
    return by_lane(padded).contiguous().view(torch.int32).flatten(2)


def padded_scale(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert `scale_words`, padding included: [padded N, padded blocks]."""
    return by_row(words.unsqueeze(-1).contiguous().view(dtype)).squeeze(-1)

"""The layout ``tiles`` that Hopper's own kernel reads: what shared memory holds while 64 rows are multiplied.

A block is 128 bytes of a lifted token, so 64 bytes of each row's values; it is multiplied in two steps of 32. Tiles of
a block lie side by side, 64 rows each; in a tile first its values, 4,096 bytes, then their positions.

- Values: step, 16 bytes, eight rows, row, byte: what a wgmma descriptor without swizzling calls core matrices.
- Positions: a word for each thread of the warp group that multiplies. Of thread ``32 w + 4 g + t`` in 8 bits, a word
  a step: row ``16 w + g + 8 (t % 2)``, the step's half ``t // 2``. In 16 bits, one word for both steps: the low half is
  of row ``16 w + g``, the high one of row ``16 w + g + 8``, the step ``t // 2``, its half ``t % 2``.
- Lifted activations lie in tiles too, [blocks, tokens, 128 bytes]; the 16 bytes at place c of a token t stand at place
  ``c ^ (t % 8)``, which is how a descriptor of 128-byte swizzling reads them.

Rows past N and columns past K' hold zeros at positions 0 and 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.slide24.layout import TOKEN_BYTES

ROWS = 64
"""Of a tile."""

STORED = TOKEN_BYTES // 2
"""Bytes of a row's values in a tile."""

FEWEST = 3
"""Tiles of a block, so that whatever a thread block takes at once is there."""

NOTHING = 0x44
"""Positions 0 and 1, twice."""


def tile_bytes(itemsize: int) -> int:
    """Give the bytes of a tile: values, and two bits for each."""
    return ROWS * STORED * (4 * itemsize + 1) // (4 * itemsize)


def tile_counts(n: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Count the blocks, and the tiles of each, of N rows of K' columns."""
    return -(-columns * itemsize // TOKEN_BYTES), max(FEWEST, -(-n // ROWS))


def tiles_of(values: Tensor, metadata: Tensor) -> Tensor:
    """Bring a weight into tiles.

    Args:
        values: [N, K' / 2] of 8 or 16 bits.
        metadata: [N, K' / 8] uint8.
    Returns:
        [blocks, tiles, bytes] uint8.
    """
    n, slots = values.shape
    wide = values.element_size()
    blocks, tiles = tile_counts(n, 2 * slots, wide)
    octets = STORED // wide // 4
    low, high = values.view(torch.uint8), metadata
    low = F.pad(low, (0, blocks * STORED - low.shape[1], 0, tiles * ROWS - n))
    high = F.pad(high, (0, blocks * octets - high.shape[1], 0, tiles * ROWS - n), value=NOTHING)
    low = low.view(tiles, 8, 8, blocks, 2, 2, 16).permute(3, 0, 4, 5, 1, 2, 6)
    high = high.view(tiles, 4, 2, 8, blocks, 2, 2, 4 // wide).permute(*POSITIONS[wide])
    return torch.cat([part.reshape(blocks, tiles, -1) for part in (low, high)], 2)


POSITIONS = {1: (4, 0, 5, 1, 3, 6, 2, 7), 2: (4, 0, 1, 3, 5, 6, 2, 7)}
"""From (tile, warp, upper row, row, block, step, half, byte) to the order of the words, by bytes of a value."""


def rows_of(tiles: Tensor, n: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give values [N, slots] and metadata [N, slots / 4] back."""
    wide = dtype.itemsize
    blocks, count, _ = tiles.shape
    low, high = tiles[..., : ROWS * STORED], tiles[..., ROWS * STORED :]
    low = low.reshape(blocks, count, 2, 2, 8, 8, 16).permute(1, 4, 5, 0, 2, 3, 6).reshape(count * ROWS, -1)
    sizes = (count, 4, 2, 8, blocks, 2, 2, 4 // wide)
    order = POSITIONS[wide]
    high = high.reshape([sizes[axis] for axis in order]).permute(*sorted(range(8), key=lambda axis: order[axis]))
    high = high.reshape(count * ROWS, -1)
    return low[:n, : slots * wide].contiguous().view(dtype), high[:n, : slots // 4].contiguous()

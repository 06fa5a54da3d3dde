"""The layout ``tiles``: the exact layout's masks and values in the order in which the GPU's kernels take them.

A tile is 16 rows by 256 columns, what one warp turns into fragments of ``mma.m16n8k16``: lane 4 * g + t owns block t of
64 columns of the rows g and g + 8, so it finds its own values without asking another lane. First come the masks, four
32-bit words a lane: the halves of its first row's and of its second's. Then values in pairs: the first pair of the
32 lanes' first rows, the first pair of their second rows, the second pairs, and so on.

Bits of the mask stand where a left shift by s brings those of the columns 4 s - 1 to 4 s + 2 of each half (32 columns)
to the sign bits of the word's four bytes; column 63 takes the place of the missing column -1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, TensorSpec, in_layout
from semisparse.formats.bitmask.pack import BLOCK, bits_of, check_content, masks_of, values_per_block

ROWS = 16
BLOCKS = 4
"""Blocks of 64 columns side by side in a tile."""

SPECS = (TensorSpec("tiles", torch.int32, ("row_tiles", "column_tiles", "words")),)

DTYPES = (torch.float16, torch.bfloat16)

_BIT_ORDER = torch.tensor(
    [(32 * half + 4 * (7 - bit % 8) + bit // 8 - 1) % BLOCK for half in (0, 1) for bit in range(32)]
)
"""The column whose bit stands at each place of a permuted mask."""


def refusal(packed: Packed) -> str | None:
    """Say why a weight cannot be stored in tiles, or None if it can."""
    if values_per_block(packed.pattern) is None:
        return f"pattern {packed.pattern} bounds no block of {BLOCK} columns"
    if packed.dtype not in DTYPES:
        return f"values have 16 bits, these are {packed.dtype}"
    return None


def counts(n: int, k: int, count: int) -> Mapping[str, int]:
    """Give the tensor's dimensions for a weight [n, k] with ``count`` values a block."""
    return {"row_tiles": -(-n // ROWS), "column_tiles": -(-k // (BLOCK * BLOCKS)), "words": 32 * words_per_lane(count)}


def words_per_lane(count: int) -> int:
    """Give how many 32-bit words a lane owns of each tile."""
    return 2 * (2 + -(-count // 2))


def tiles_of(packed: Packed) -> dict[str, Tensor]:
    """Give the tensors of the layout ``tiles`` for a weight in the layout ``rows``.

    Padding up to whole tiles is what rows have past column K: ``count`` zeros at a block's lowest positions.

    Raises:
        FormatError: the weight cannot be stored so.
    """
    reason = refusal(packed)
    if reason:
        raise FormatError(f"format bitmask cannot store this weight in tiles: {reason}")
    count = values_per_block(packed.pattern) or 0
    masks, values = packed.tensors["masks"], packed.tensors["values"]
    n, blocks = masks.shape
    values = F.pad(values.view(n, blocks, count), (0, count % 2, 0, -blocks % BLOCKS, 0, -n % ROWS))
    padded = masks.new_full(values.shape[:2], _lowest_bits(count))  # F.pad would take the number through a double
    padded[:n, :blocks] = masks
    padded = masks_of(bits_of(padded)[..., _BIT_ORDER.to(masks.device)])
    masks, pairs = _by_lane(padded.unsqueeze(-1).view(torch.int32)), _by_lane(values.view(torch.int32))
    pairs = pairs.unflatten(-1, (2, -1)).permute(0, 1, 4, 3, 2)  # row tile, column tile, pair, row half, lane
    return {"tiles": torch.cat([masks.flatten(2), pairs.flatten(2)], dim=-1)}


def rows_of(packed: Packed) -> dict[str, Tensor]:
    """Give the tensors of the layout ``rows`` for a weight in the layout ``tiles``."""
    masks, values = _untiled(packed)
    n, k = packed.shape
    blocks = -(-k // BLOCK)
    return {"masks": masks[:n, :blocks].contiguous(), "values": values[:n, :blocks].flatten(1)}


def check_tiles(packed: Packed) -> None:
    """Check every mask's bit count, and that the padding holds zeros at the lowest positions.

    Raises:
        FormatError: says what is wrong, and where in terms of rows and blocks of 64 columns.
    """
    n, k = packed.shape
    count = values_per_block(packed.pattern) or 0
    masks, values = _untiled(packed)
    padding = torch.ones_like(masks, dtype=torch.bool)
    padding[:n, : -(-k // BLOCK)] = False
    filled = padding & ((masks != _lowest_bits(count)) | (values != 0).any(-1))
    if filled.any():
        raise FormatError(f"tensor tiles: the padding at row, block {filled.nonzero()[0].tolist()} is not empty")
    if count % 2 and (_lane_words(packed)[1][..., -1] >> 16 != 0).any():
        raise FormatError(f"tensor tiles: a lane holds more than {count} values a row")
    rows = in_layout(packed, {}, rows_of(packed))
    check_content(rows)


def _untiled(packed: Packed) -> tuple[Tensor, Tensor]:
    """Give masks [padded N, padded blocks] and values [padded N, padded blocks, count]."""
    masks, values = _lane_words(packed)
    column_order = _BIT_ORDER.argsort().to(masks.device)
    masks = masks_of(bits_of(masks.view(torch.int64).squeeze(-1))[..., column_order])
    return masks, values.view(packed.dtype)[..., : values_per_block(packed.pattern)]


def _by_lane(words: Tensor) -> Tensor:
    """Bring a lane's rows together: [padded N, padded blocks, words] to [row tiles, column tiles, 32, 2 * words]."""
    tiles = words.unflatten(1, (-1, BLOCKS)).unflatten(0, (-1, 2, ROWS // 2))  # row tile, half, g, column tile, t, word
    return tiles.permute(0, 3, 2, 4, 1, 5).flatten(4).flatten(2, 3)


def _lane_words(packed: Packed) -> tuple[Tensor, Tensor]:
    """Undo the order of a tile: the words of masks and of values, each [padded N, padded blocks, words]."""
    masks, pairs = packed.tensors["tiles"].tensor_split([32 * 4], dim=-1)
    lanes = pairs.unflatten(-1, (-1, 2, 32)).permute(0, 1, 4, 3, 2).flatten(3)
    return _by_row(masks.unflatten(-1, (32, 4))), _by_row(lanes)


def _by_row(lanes: Tensor) -> Tensor:
    """Undo `_by_lane`."""
    tiles = lanes.unflatten(-1, (2, -1)).unflatten(2, (ROWS // 2, BLOCKS))  # row tile, column tile, g, t, half, word
    words = tiles.permute(0, 4, 2, 1, 3, 5).flatten(3, 4).flatten(0, 2)
    return words.clone(memory_format=torch.contiguous_format)  # a single word a lane may have any stride otherwise


def _lowest_bits(count: int) -> int:
    """Give the mask of the lowest ``count`` bits as a signed 64-bit number."""
    return (1 << count) - 1 if count < BLOCK else -1

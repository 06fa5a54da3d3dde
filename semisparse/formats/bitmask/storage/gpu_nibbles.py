"""Codes of 4 bits in the layout ``tiles``: scales, then a code per column. README.md has the figure and the reason.

A word has the codes of eight neighbours, in the order of columns 0, 2, 4, 6, 1, 3, 5, 7. So one shift moves those of
two neighbours to the low nibbles of its 16-bit halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage.codes import middle_code, pack_codes, unpack_codes
from semisparse.formats.bitmask.storage.disk import BLOCK, lowest_dead, masks_of
from semisparse.formats.bitmask.storage.lanes import LANES, by_lane, by_row, pad_to_tiles, padded_scale, scale_words
from semisparse.runtime.bits import bits_of

BITS = 4

WORDS_PER_LANE = 17
"""32-bit words of a lane: two scales of 16 bits, and 64 codes of two rows."""

_COLUMN_ORDER = torch.tensor([first + column for first in range(0, BLOCK, 8) for column in (0, 2, 4, 6, 1, 3, 5, 7)])


def to_words(packed: Packed) -> Tensor:
    """Return the tiles of a weight in the layout ``rows``: [row tiles, column tiles, words] int32.

    Padding rows and blocks hold zeros, with scale 1.
    """
    codes = unpack_codes(packed.tensors["codes"].flatten(), bits_of(packed.tensors["masks"]), BITS)
    n, blocks = codes.shape[:2]
    padded = codes.new_full(pad_to_tiles(codes).shape, middle_code(BITS))
    padded[:n, :blocks] = codes
    pairs = padded[..., _COLUMN_ORDER.to(codes.device)].unflatten(-1, (-1, 2))
    words = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int32)
    vectors = by_lane(words).unflatten(-1, (4, 4)).permute(0, 1, 3, 2, 4)  # row tile, column tile, vector, lane, word
    return torch.cat([scale_words(packed.tensors["scale"]), vectors.flatten(2)], dim=-1)


def padded_rows(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the codes [padded N, padded blocks, 64] uint8 and the scales [padded N, padded blocks]."""
    scale, vectors = packed.tensors["tiles"].tensor_split([LANES], dim=-1)
    octets = by_row(vectors.unflatten(-1, (4, LANES, 4)).permute(0, 1, 3, 2, 4).flatten(3)).view(torch.uint8)
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return codes[..., _COLUMN_ORDER.argsort().to(codes.device)], padded_scale(scale, packed.dtype)


def to_rows(packed: Packed, keep: int) -> dict[str, Tensor]:
    """Return the tensors of the layout ``rows``; no block has more than ``keep`` codes that are not zero's."""
    codes, scale = padded_rows(packed)
    n, blocks = packed.shape[0], -(-packed.shape[1] // BLOCK)
    codes, scale = codes[:n, :blocks], scale[:n, :blocks].contiguous()
    stored = codes != middle_code(BITS)
    stored |= lowest_dead(stored, keep)
    return {"masks": masks_of(stored), "codes": pack_codes(codes, stored, BITS).view(n, -1), "scale": scale}

"""Codes of 8 bits in the layout ``tiles``: codes, masks, scales. README.md has the figure.

A k-step of a kernel takes four neighbouring columns of each block. The first word of its fragment holds columns 0 and
1, whose codes must be bytes 0 and 2 of the four codes. So of each four columns, mask bits and codes have the order 0,
2, 1, 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage.codes import middle_code, unpack_codes
from semisparse.formats.bitmask.storage.disk import BLOCK, masks_of
from semisparse.formats.bitmask.storage.lanes import LANES, by_lane, by_row, pad_to_tiles, padded_scale, scale_words
from semisparse.runtime.bits import bits_of

BITS = 8

_COLUMN_ORDER = torch.tensor([first + column for first in range(0, BLOCK, 4) for column in (0, 2, 1, 3)])

_BIT_ORDER = torch.tensor(
    [32 * half + 16 * part + 4 * (bit % 4) + bit // 4 for half in (0, 1) for part in (0, 1) for bit in range(16)]
)
"""The place in `_COLUMN_ORDER` that each bit of a mask stands for. Of 16 bits, bit q of nibble j is place 4 q + j."""


def words_per_lane(keep: int) -> int:
    """Return the 32-bit words of a lane: two masks of 64 bits, two scales of 16, and the codes of two rows."""
    return 5 + 2 * -(-keep // 4)


def to_words(packed: Packed, keep: int) -> Tensor:
    """Return the tiles of a weight in the layout ``rows``: [row tiles, column tiles, words] int32.

    Padding rows and blocks store ``keep`` zeros at their lowest columns, with scale 1.
    """
    stored = bits_of(packed.tensors["masks"])
    n, blocks = stored.shape[:2]
    order = _COLUMN_ORDER.to(stored.device)
    codes = unpack_codes(packed.tensors["codes"].flatten(), stored, BITS)
    lowest = torch.arange(BLOCK, device=stored.device) < keep
    in_tiles = lowest.expand(pad_to_tiles(stored).shape).clone()
    in_tiles[:n, :blocks] = stored
    in_tiles = in_tiles[..., order]
    padded = codes.new_full(in_tiles.shape, middle_code(BITS))
    padded[:n, :blocks] = codes[..., order]
    stream = F.pad(padded.masked_select(in_tiles).view(*in_tiles.shape[:2], keep), (0, -keep % 4))
    masks = masks_of(in_tiles[..., _BIT_ORDER.to(stored.device)]).unsqueeze(-1).view(torch.int32)
    words = by_lane(stream.contiguous().view(torch.int32)).unflatten(-1, (2, -1)).permute(0, 1, 4, 3, 2)
    return torch.cat([words.flatten(2), by_lane(masks).flatten(2), scale_words(packed.tensors["scale"])], dim=-1)


def padded_rows(packed: Packed, keep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what tiles hold, padding included.

    Returns:
        masks: [padded N, padded blocks] int64, as on disk.
        codes: [padded N, padded blocks, keep] uint8, in column order.
        scale: [padded N, padded blocks] in the weight's dtype.
        after: what follows the codes, [padded N, padded blocks, 0 to 3] uint8.
    """
    words, masks, scale = packed.tensors["tiles"].tensor_split([-5 * LANES, -LANES], dim=-1)
    masks = by_row(masks.unflatten(-1, (LANES, 4))).view(torch.int64).squeeze(-1)
    in_order = bits_of(masks)[..., _BIT_ORDER.argsort().to(masks.device)]
    octets = by_row(words.unflatten(-1, (-1, 2, LANES)).permute(0, 1, 4, 3, 2).flatten(3)).view(torch.uint8)
    column_order = _COLUMN_ORDER.argsort().to(masks.device)
    stored = in_order[..., column_order]
    codes = torch.zeros(stored.shape, dtype=torch.uint8, device=masks.device)
    codes.masked_scatter_(in_order, octets[..., :keep].contiguous())
    codes = codes[..., column_order].masked_select(stored).view(*stored.shape[:2], -1)
    return masks_of(stored), codes, padded_scale(scale, packed.dtype), octets[..., keep:]


def to_rows(packed: Packed, keep: int) -> dict[str, Tensor]:
    """Return the tensors of the layout ``rows``."""
    masks, codes, scale, _ = padded_rows(packed, keep)
    n, blocks = packed.shape[0], -(-packed.shape[1] // BLOCK)
    tensors = {"masks": masks, "codes": codes, "scale": scale}
    rows = {name: tensor[:n, :blocks].contiguous() for name, tensor in tensors.items()}
    return rows | {"codes": rows["codes"].flatten(1)}

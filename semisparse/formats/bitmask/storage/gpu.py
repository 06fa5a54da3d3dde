"""The layout on a GPU, ``tiles``: lane-interleaved tiles of 16 x 256 in the fragment order of ``mma.m16n8k16``.

README.md has the figure, gpu_bytes.py and gpu_nibbles.py the tiles of codes. Lane l owns 64 columns of row g = l // 4
and of row g + 8 (lanes.py). A tile of 16-bit values holds pairs of values, those of the 32 lanes side by side: pair 0
of row g, pair 0 of row g + 8, pair 1 of row g, and so on. Behind them are the two masks of each lane, four 32-bit
words.

Word h of a mask (h = 0, 1) holds columns 32 h - 1 to 32 h + 30, with column 63 in the place of column -1. Its bits are
permuted: a left shift by s (0 to 7) moves columns 32 h + 4 s - 1 to 32 h + 4 s + 2 to the sign bits of the four bytes.
Lanes expand columns in pairs; because of the offset of one, these four bits complete the count of values up to the
first column of a pair (cuda/tile_values.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, TensorSpec, WeightSpec
from semisparse.formats.bitmask.storage import gpu_bytes, gpu_nibbles
from semisparse.formats.bitmask.storage.codes import code_bits
from semisparse.formats.bitmask.storage.disk import BLOCK, masks_of, values_per_block
from semisparse.formats.bitmask.storage.lanes import COLUMNS, LANES, ROWS, by_lane, by_row, pad_to_tiles
from semisparse.runtime.bits import bits_of

SPECS = (TensorSpec("tiles", torch.int32, ("row_tiles", "column_tiles", "words")),)

DTYPES = (torch.float16, torch.bfloat16)

_BIT_ORDER = torch.tensor(
    [(32 * half + 4 * (7 - bit % 8) + bit // 8 - 1) % BLOCK for half in (0, 1) for bit in range(32)]
)
"""The column that each bit of a permuted mask stands for."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of a weight.

    Args:
        row_tiles: tiles along N.
        column_tiles: tiles along K.
        keep: values or codes per row and 64 columns.
        bits: per code; 0 for values.
    """

    row_tiles: int
    column_tiles: int
    keep: int
    bits: int = 0

    @property
    def words(self) -> int:
        """32-bit words per tile. Per lane, 16-bit values take two 64-bit masks and the value pairs of two rows."""
        if self.bits == 4:
            return LANES * gpu_nibbles.WORDS_PER_LANE
        return LANES * (gpu_bytes.words_per_lane(self.keep) if self.bits else 4 + 2 * -(-self.keep // 2))

    @property
    def tile_bytes(self) -> int:
        """Bytes per tile."""
        return 4 * self.words


def refusal(spec: WeightSpec) -> str | None:
    """Say why a weight cannot be stored in tiles, or None if it can."""
    if values_per_block(spec.pattern) is None:
        return f"pattern {spec.pattern} does not bound the values per {BLOCK} columns"
    if spec.dtype not in DTYPES:
        return f"tiles hold 16-bit values, or codes with 16-bit scales, these are {spec.dtype}"
    return None


def tiling(spec: WeightSpec) -> Tiling:
    """Return the tiles of a weight.

    Raises:
        ValueError: it cannot be stored in tiles.
    """
    reason = refusal(spec)
    if reason:
        raise ValueError(reason)
    n, k = spec.shape
    return Tiling(-(-n // ROWS), -(-k // COLUMNS), values_per_block(spec.pattern) or 0, code_bits(spec.params))


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensor."""
    tiles = tiling(spec)
    return {"row_tiles": tiles.row_tiles, "column_tiles": tiles.column_tiles, "words": tiles.words}


def to_tiles(packed: Packed) -> Packed:
    """Return a weight of the layout ``rows`` in the layout ``tiles``.

    Rows and blocks that pad to whole tiles store ``keep`` zeros at their lowest columns, as empty blocks do on disk.
    """
    keep = tiling(packed.spec).keep
    if bits := code_bits(packed.params):
        tiles = gpu_nibbles.to_words(packed) if bits == 4 else gpu_bytes.to_words(packed, keep)
        return packed.in_layout({"kind": packed.params["kind"], "layout": "tiles"}, {"tiles": tiles})
    masks, values = packed.tensors["masks"], packed.tensors["values"]
    n, blocks = masks.shape
    values = pad_to_tiles(F.pad(values.view(n, blocks, keep), (0, keep % 2)))
    padded = masks.new_full(values.shape[:2], padding_mask(keep))  # F.pad would round the 64-bit fill value to a double
    padded[:n, :blocks] = masks
    padded = masks_of(bits_of(padded)[..., _BIT_ORDER.to(masks.device)])
    masks, pairs = by_lane(padded.unsqueeze(-1).view(torch.int32)), by_lane(values.view(torch.int32))
    pairs = pairs.unflatten(-1, (2, -1)).permute(0, 1, 4, 3, 2)  # row tile, column tile, pair, row half, lane
    tiles = torch.cat([pairs.flatten(2), masks.flatten(2)], dim=-1)
    return packed.in_layout({"layout": "tiles"}, {"tiles": tiles})


def to_rows(packed: Packed) -> Packed:
    """Return a weight of the layout ``tiles`` in the layout ``rows``."""
    if bits := code_bits(packed.params):
        to_rows_of_codes = gpu_nibbles.to_rows if bits == 4 else gpu_bytes.to_rows
        kind = {"kind": packed.params["kind"]}
        return packed.in_layout(kind, to_rows_of_codes(packed, tiling(packed.spec).keep))
    masks, values, _ = padded_rows(packed)
    n, k = packed.shape
    blocks = -(-k // BLOCK)
    tensors = {"masks": masks[:n, :blocks].contiguous(), "values": values[:n, :blocks].flatten(1)}
    return packed.in_layout({}, tensors)


def padded_rows(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masks, the values and the padding of pairs of a weight in tiles of 16-bit values.

    Masks are in the order of columns, [padded N, padded blocks]; values are [padded N, padded blocks, keep]. The
    padding, [padded N, padded blocks, keep % 2], is what follows the last value where ``keep`` is odd.
    """
    pairs, masks = packed.tensors["tiles"].tensor_split([-4 * LANES], dim=-1)
    lanes = pairs.unflatten(-1, (-1, 2, LANES)).permute(0, 1, 4, 3, 2).flatten(3)
    masks, values = by_row(masks.unflatten(-1, (LANES, 4))), by_row(lanes).view(packed.dtype)
    column_order = _BIT_ORDER.argsort().to(masks.device)
    masks = masks_of(bits_of(masks.view(torch.int64).squeeze(-1))[..., column_order])
    keep = tiling(packed.spec).keep
    return masks, values[..., :keep], values[..., keep:]


def padding_mask(keep: int) -> int:
    """Return the mask of the lowest ``keep`` columns as a signed 64-bit number."""
    return (1 << keep) - 1 if keep < BLOCK else -1

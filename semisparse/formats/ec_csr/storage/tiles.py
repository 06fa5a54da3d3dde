"""Mask tiles, a layout for GPUs: tiles of 16 x 256 in the fragment order of ``mma.m16n8k16``, with a bit per column.

README.md has the figure. Lane 4 g + t owns the columns 64 t to 64 t + 63 of rows g and g + 8. A tile has the two masks
of each lane (four 32-bit words), then the values of each lane, row g's before those of row g + 8, two to a word: word 0
of lanes 0 to 31, word 1 of lanes 0 to 31, and so on, as many as its longest lane needs.

Word h of a mask (h = 0, 1) holds columns 32 h - 1 to 32 h + 30, with column 63 in the place of column -1. Its bits are
permuted: a left shift by s (0 to 7) moves columns 32 h + 4 s - 1 to 32 h + 4 s + 2 to the sign bits of the four bytes.
Lanes expand columns in pairs; because of the offset of one, these four bits complete the count of values up to the
first column of a pair (cuda/tile.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, TensorSpec, WeightSpec, choice_of, refuse_first
from semisparse.formats.ec_csr.storage.deltas import LANES

ROWS, COLUMNS = 16, 256
"""Rows and columns per tile."""

BLOCK = 64
"""Columns of a row that a lane owns."""

UNIT = 128
"""Bytes in which ``tile_starts`` counts: a word of every lane."""

MASK_UNITS = 4
"""Units of the masks, in front of the values."""

LIMITS = tuple(range(2, BLOCK + 3, 4))
"""Values of ``words_limit``, the words per lane that shared memory is sized for: one more than the largest tile has,
rounded up to one of few values, so that layers of one shape share their kernels. Random masks of 70 % have 30 or 34."""

LONGEST = 2.1
"""Standard deviations by which the longest of a tile's 32 lanes exceeds their mean, in random weights."""

DTYPES = (torch.float16, torch.bfloat16)

STORED = ("tiles", "tile_starts")

BATCH = 1 << 24
"""Dense weights packed or unpacked at a time."""


def tile_shape(n: int, k: int) -> tuple[int, int]:
    """Return the number of tiles along N and along K."""
    return -(-n // ROWS), -(-k // COLUMNS)


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    return (
        TensorSpec("tiles", torch.int32, ("units", "lanes")),
        TensorSpec("tile_starts", torch.int32, ("tiles+1",)),
    )


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    row_tiles, column_tiles = tile_shape(*spec.shape)
    return {"units": int(spec.params["units"]), "lanes": LANES, "tiles": row_tiles * column_tiles}


def pack(weight: Tensor) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Store the non-zeros of ``weight`` ([N, K], 16 bits) in tiles.

    Returns:
        The params ``units``, those of all tiles, and ``words_limit``, one of `LIMITS`; the tensors.
    """
    row_tiles, column_tiles = tile_shape(*weight.shape)
    written = [_written(batch) for batch in _batches(weight)]
    units = torch.cat([MASK_UNITS + words for _, words in written]) if written else torch.zeros(0, dtype=torch.int64)
    starts = torch.zeros(row_tiles * column_tiles + 1, dtype=torch.int32, device=weight.device)
    starts[1:] = units.cumsum(0)
    most = int(units.max()) - MASK_UNITS
    params = {"units": int(starts[-1]), "words_limit": next(limit for limit in LIMITS if limit > most)}
    return params, {"tiles": torch.cat([tiles for tiles, _ in written]), "tile_starts": starts}


def _batches(weight: Tensor) -> Iterator[Tensor]:
    """Yield the lanes' weights of some row tiles, [tiles, lanes, 2 * BLOCK], rows and columns padded with zeros."""
    n, k = weight.shape
    step = max(1, BATCH // (ROWS * -(-k // COLUMNS) * COLUMNS)) * ROWS
    for first in range(0, n, step):
        rows = weight[first : first + step]
        padded = F.pad(rows, (0, -k % COLUMNS, 0, -len(rows) % ROWS))
        tiles = padded.view(-1, 2, ROWS // 2, -(-k // COLUMNS), COLUMNS // BLOCK, BLOCK)
        yield tiles.permute(0, 3, 2, 4, 1, 5).reshape(-1, LANES, 2 * BLOCK)


def _written(lanes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the units of some tiles, [units, lanes] int32, and the words per lane of each."""
    kept = lanes != 0
    counted = kept.cumsum(-1, dtype=torch.int16)
    words = (counted[..., -1].amax(1).long() + 1) // 2
    ends = (MASK_UNITS + words).cumsum(0)
    halves = torch.zeros(int(ends[-1]) * LANES * 2, dtype=torch.int16, device=lanes.device)
    tile, lane, entry = kept.nonzero(as_tuple=True)
    number = counted[tile, lane, entry].long() - 1
    starts = ends - words  # of the values
    halves[((starts[tile] + number // 2) * LANES + lane) * 2 + number % 2] = lanes[tile, lane, entry].view(torch.int16)
    units = halves.view(torch.int32).view(-1, LANES)
    at = (ends - words - MASK_UNITS)[:, None] + torch.arange(MASK_UNITS, device=lanes.device)
    units[at] = _masks(kept).view(-1, MASK_UNITS, LANES)
    return units, words


def _bits_of_columns(device: torch.device) -> Tensor:
    """Return the bit of the two permuted mask words that stands for each column, [BLOCK] int64.

    Computed on the device: a copy from the host could not be captured in a CUDA graph.
    """
    place = (torch.arange(BLOCK, device=device) + 1) % BLOCK
    word, offset = place // 32, place % 32
    return word * 32 + offset % 4 * 8 + 7 - offset // 4


def _masks(kept: Tensor) -> Tensor:
    """Return four mask words of every lane, [tiles, lanes, 4] int32, from [tiles, lanes, 2 * BLOCK] bool."""
    columns = _bits_of_columns(kept.device).argsort()
    bits = kept.unflatten(-1, (2, BLOCK))[..., columns].unflatten(-1, (2, 32))
    weights = torch.ones(32, dtype=torch.int32, device=kept.device) << torch.arange(
        32, dtype=torch.int32, device=kept.device
    )
    return (bits * weights).sum(-1, dtype=torch.int32).flatten(-2)


def tiles_of(packed: Packed) -> dict[str, Tensor]:
    """Return the tensors of the mask tiles."""
    return {name: packed.tensors[name] for name in STORED}


def check(packed: Packed) -> None:
    """Check that every tile lies in the tensor and holds what its masks say, with no weight past N or K.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    (n, k), starts = packed.shape, packed.tensors["tile_starts"].long()
    limit = choice_of("ec_csr", packed.params, "words_limit", LIMITS)
    units, words = len(packed.tensors["tiles"]), starts.diff() - MASK_UNITS
    if starts[0] != 0 or starts[-1] != units:
        raise FormatError(f"tensor tile_starts runs from {int(starts[0])} to {int(starts[-1])}, expected 0 to {units}")
    refuse_first((words < 0) | (words >= int(limit)), "tile_starts", f"the tile has no words, or not below {limit}")
    for first, kept in _kept(packed):
        needed = (kept.sum(-1).amax(1) + 1) // 2
        refuse_first(
            needed > words[first : first + len(kept)], "tiles", "the masks mark more values than the tile has", (first,)
        )
        by_row = _by_row(kept, tile_shape(n, k)[1])
        rows = n - first // tile_shape(n, k)[1] * ROWS
        if by_row[:, k:].any() or by_row[max(0, rows) :].any():
            raise FormatError(f"tensor tiles: a mask marks a weight past N, K = {n, k}")


def _kept(packed: Packed) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of a tile and which weights it and the following tiles keep, [tiles, lanes, 2 * BLOCK] bool."""
    tiles, starts = packed.tensors["tiles"], packed.tensors["tile_starts"].long()
    column_tiles = tile_shape(*packed.shape)[1]
    order, bit = _bits_of_columns(tiles.device), torch.arange(32, dtype=torch.int32, device=tiles.device)
    step = max(1, BATCH // (ROWS * column_tiles * COLUMNS)) * column_tiles
    for first in range(0, len(starts) - 1, step):
        begins = starts[first : min(first + step, len(starts) - 1)]
        words = tiles[begins[:, None] + torch.arange(MASK_UNITS, device=tiles.device)].reshape(-1, LANES, 2, 2, 1)
        yield first, (words >> bit & 1).flatten(-2)[..., order].flatten(-2).bool()


def _by_row(lanes: Tensor, column_tiles: int) -> Tensor:
    """Return the rows of some row tiles, padding included, from their lanes: [tiles, lanes, 2 * BLOCK]."""
    by_tile = lanes.view(-1, column_tiles, ROWS // 2, COLUMNS // BLOCK, 2, BLOCK)
    return by_tile.permute(0, 4, 2, 1, 3, 5).reshape(-1, column_tiles * COLUMNS)


def unpack(packed: Packed) -> Tensor:
    """Return the weight, [N, K] in its dtype."""
    (n, k), starts = packed.shape, packed.tensors["tile_starts"].long()
    halves = packed.tensors["tiles"].view(-1).view(packed.dtype)
    lane, rows = torch.arange(LANES, device=starts.device)[:, None], []
    for first, kept in _kept(packed):
        number = kept.cumsum(-1, dtype=torch.int16).long() - 1
        begins = starts[first : first + len(kept), None, None] + MASK_UNITS
        at = ((begins + number // 2) * LANES + lane) * 2 + number % 2
        lanes = halves[at.clamp(0, halves.numel() - 1)].masked_fill_(~kept, 0)
        rows.append(_by_row(lanes, tile_shape(n, k)[1]))
    return torch.cat(rows)[:n, :k].contiguous()

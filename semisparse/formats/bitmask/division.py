"""How the decode kernel's work is dealt out to blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from semisparse.formats.bitmask.tiles import ROWS

MOST_WARPS = 16
"""That a processor has registers for: the kernels take 97 to 151 each."""

MOST_SPLITS = 8

RESERVED_SHARED = 1024
"""Bytes of shared memory that each block costs beside its own."""


@dataclass(frozen=True)
class Processor:
    """What a GPU gives: how many processors, and the bytes of shared memory in each."""

    count: int
    shared: int


@dataclass(frozen=True)
class Division:
    """How a decode product is dealt out.

    Args:
        splits: warps that share a tile of rows, each with a part of the columns.
        rows: tiles of rows that a block computes at a time.
        panel: column tiles of x that a block holds in shared memory: all, or a multiple of ``splits``.
        blocks: how many; together they walk over the rows.
        shared: bytes of dynamic shared memory of a block.
    """

    splits: int
    rows: int
    panel: int
    blocks: int
    shared: int


@lru_cache(maxsize=1024)
def divide(m: int, row_tiles: int, column_tiles: int, keep: int, gpu: Processor) -> Division:
    """Choose how a decode product is dealt out, from what was fastest on an H200 (132 processors).

    Args:
        m: tokens, 1 to 16.
        row_tiles: tiles along N.
        column_tiles: tiles along K.
        keep: values a block.
        gpu: what it runs on.
    """
    if m == 1 and gpu.count < row_tiles <= 2 * gpu.count:
        preferred = (6, 2)  # a block a processor: 7.9 against 8.1 us at 4096 x 4096, 17.9 against 19.8 at 4096 x 11008
    elif m == 1 and row_tiles >= gpu.count:
        preferred = (-(-column_tiles // 2), 1)  # two tiles a warp: 7.9 against 8.4 us at 8960 x 1536
    else:
        preferred = (column_tiles, 1)
    # Small blocks want company on their processor; where x leaves no room for it, larger blocks share x.
    for splits, rows in (preferred, (6, 2)) if m <= 8 else (preferred, (6, 2), (3, 2)):
        splits = min(splits, column_tiles, MOST_SPLITS)
        if _resident(m, splits, rows, column_tiles, keep, gpu) >= (2 if rows == 1 else 1):
            return _division(m, splits, rows, column_tiles, row_tiles, keep, gpu)
    # x comes in parts. For up to 8 tokens warps are worth more than larger parts, for 16 not (34.6 against 42.5 us).
    shapes = ((6, 2), (3, 2), (2, 1), (1, 1)) if m <= 8 else ((3, 2), (2, 1), (1, 1))
    splits, rows = next((s, r) for s, r in shapes if s <= column_tiles and _resident(m, s, r, s, keep, gpu))
    parts = [p for p in range(splits, column_tiles, splits) if _resident(m, splits, rows, p, keep, gpu)]
    whole = _resident(m, splits, rows, column_tiles, keep, gpu)
    return _division(m, splits, rows, column_tiles if whole else parts[-1], row_tiles, keep, gpu)


def _division(m: int, splits: int, rows: int, panel: int, row_tiles: int, keep: int, gpu: Processor) -> Division:
    resident = _resident(m, splits, rows, panel, keep, gpu)
    blocks = min(-(-row_tiles // rows), gpu.count * resident)
    return Division(splits, rows, panel, blocks, _shared(m, splits, rows, panel, keep)[0])


def _resident(m: int, splits: int, rows: int, panel: int, keep: int, gpu: Processor) -> int:
    """Count the blocks that a processor can hold at a time."""
    dynamic, static = _shared(m, splits, rows, panel, keep)
    return min(gpu.shared // (dynamic + static + RESERVED_SHARED), MOST_WARPS // (splits * rows))


def _shared(m: int, splits: int, rows: int, panel: int, keep: int) -> tuple[int, int]:
    """Give a block's bytes of dynamic and of static shared memory, as tiled_decode.cu takes them."""
    warps = splits * rows
    staged = warps * 2 * (keep + 1) * 128
    pitch = 36 * panel + (0 if panel % 2 else 4)
    return staged + m * pitch * 16, 2 * warps * tokens_of_build(m) * ROWS * 4


def tokens_of_build(m: int) -> int:
    """Give the tokens that the build for ``m`` has registers for."""
    return 8 if m <= 8 else 16

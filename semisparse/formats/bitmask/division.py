"""How the decode kernel's work is dealt out to blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from semisparse.formats.bitmask.tiles import ROWS, words_per_lane

MOST_WARPS = {1: 20, 8: 20, 16: 16, 32: 16, 64: 10}
"""That a processor has registers for, by the tokens of the build: they take up to 96, 96, 128, 128 and 200."""

TOKEN_BYTES = 512
"""Of shared memory, for a token's columns that go with a tile: kTokenBytes in tiled_decode.cu."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that each block costs beside its own."""


@dataclass(frozen=True)
class Processor:
    """What a GPU gives.

    Args:
        count: of its processors.
        shared: bytes of shared memory in each.
    """

    count: int
    shared: int


@dataclass(frozen=True)
class Division:
    """How a decode product is dealt out.

    Args:
        tokens: that the build has registers for, one of `MOST_WARPS`.
        splits: warps of a team, which share a tile of rows, each with a part of the columns.
        teams: of a block.
        stages: tiles of each warp in flight or being read.
        blocks: how many; their teams walk over the rows together.
        shared: bytes of dynamic shared memory of a block.
    """

    tokens: int
    splits: int
    teams: int
    stages: int
    blocks: int
    shared: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.splits * self.teams


@lru_cache(maxsize=1024)
def divide(m: int, row_tiles: int, column_tiles: int, keep: int, gpu: Processor) -> Division:
    """Choose how a decode product is dealt out, from what was fastest on an H200 (132 processors).

    Args:
        m: tokens, 1 to 64.
        row_tiles: tiles along N.
        column_tiles: tiles along K.
        keep: values a block.
        gpu: what it runs on.
    """
    tokens = next(tokens for tokens in MOST_WARPS if m <= tokens)
    preferred = _preferred(m, row_tiles, column_tiles, gpu.count)
    # The others are for more values a block and for GPUs with less shared memory; the last fits anywhere.
    choices = (preferred, (6, 2, 2), (*preferred[:2], 1), (4, 1, 1), (1, 1, 1))
    fitting = (division(tokens, m, min(s, column_tiles), t, p, row_tiles, keep, gpu) for s, t, p in choices)
    return next(found for found in fitting if found is not None)


def _preferred(m: int, row_tiles: int, column_tiles: int, processors: int) -> tuple[int, int, int]:
    """Give splits, teams and stages."""
    few_rows = row_tiles <= 2 * processors
    if m > 32:
        return (2, 2, 1) if row_tiles <= 3 * processors else (1, 8, 2)
    if m > 16:
        return (4, 2, 1) if few_rows else (2, 4, 2)
    if column_tiles <= 6:
        return (6, 1, 2) if m <= 8 else (3, 1, 2)
    if column_tiles <= 16:
        # Every warp has one or two column tiles, so that x stays in its place: 8.4 us for 10.5 at 4096 x 4096, m = 8.
        return (4, 1, 2) if m == 1 and few_rows else (8, 1, 2)
    if row_tiles <= processors:
        return (12, 1, 2) if m <= 8 else (6, 1, 2)  # two teams a block would leave half of the processors idle
    if m > 8:
        return 4, 2, 2
    if few_rows:
        return 6, 2, 2
    return (16, 1, 2) if m == 1 else (8, 2, 2)


def division(
    tokens: int, m: int, splits: int, teams: int, stages: int, row_tiles: int, keep: int, gpu: Processor
) -> Division | None:
    """Give a division with as many blocks as the GPU holds at a time, or None if it holds none."""
    warps = splits * teams
    places = stages * (warps * tile_bytes(keep) + splits * m * TOKEN_BYTES)
    shared = places + 2 * warps * tokens * ROWS * 4
    resident = min(gpu.shared // (shared + RESERVED_SHARED), MOST_WARPS[tokens] // warps)
    if not resident:
        return None
    return Division(tokens, splits, teams, stages, min(-(-row_tiles // teams), gpu.count * resident), shared)


def tile_bytes(keep: int) -> int:
    """Give the bytes of a tile."""
    return 128 * words_per_lane(keep)

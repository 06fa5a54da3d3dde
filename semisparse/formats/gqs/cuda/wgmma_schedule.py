"""What `gemm_wgmma.cu` makes of a problem: its tiles, and how fast they are."""

from __future__ import annotations

from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem
from semisparse.runtime.expand_gemm import Rates, Tiles

MIN_TOKENS, MAX_TOKENS = 17, 1024
"""Measured on an H200 (results/h200/sweeps/expand-gemm.csv): others are faster below; more were not timed."""

LANE_COLUMNS = 64
"""Columns of each of its two rows that a lane has per tile."""

HEADER_BYTES = 16

HEADERS_AHEAD = 3
"""Tiles whose headers are in shared memory before them: kAhead of wgmma_stream.cuh."""

MAX_STAGES = 4

RATES = Rates(
    stream_k={
        16: ((4, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1)),
        32: ((4, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1)),
        64: ((4, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1)),
        128: ((3, 1, 1), (2, 1, 1), (1, 1, 1)),
        192: ((2, 2, 1), (1, 2, 1)),
        256: ((2, 2, 1), (1, 2, 1)),
    },
    tile_us=0.11,
    token_us=0.0008,
)


def tiles_of(n: int, k: int, bits: int, size: int) -> Tiles:
    """Return the tiles of a weight, as wgmma_tile.cuh lays them out in shared memory.

    Args:
        n: output features.
        k: input features.
        bits: of a code.
        size: columns of a group.
    """
    columns = min(size, LANE_COLUMNS)
    chunks, parts = LANE_COLUMNS // columns, size // columns
    groups = 64 * chunks
    codes = -(-groups * size * bits // 8 // 16) * 16 + 16
    along_k = -(-k // (CHUNK_GROUPS * size))
    return Tiles(
        -(-n // CHUNK_ROWS),
        -(-along_k // chunks) * parts,
        codes + 3 * groups + 32,
        extra_per_warp=(MAX_STAGES + HEADERS_AHEAD) * chunks * HEADER_BYTES,
        max_stages=MAX_STAGES,
    )


def pays(problem: Problem) -> bool:
    """Say whether `gemm_wgmma` is taken to be faster than all others."""
    return MIN_TOKENS <= problem.m <= MAX_TOKENS

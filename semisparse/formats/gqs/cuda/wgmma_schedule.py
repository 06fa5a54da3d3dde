"""The tiles of `gemm_wgmma.cu`, their rates, and when it pays."""

from __future__ import annotations

from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem
from semisparse.runtime.gemm_schedule import Rates, Tiles

MIN_TOKENS, MAX_TOKENS = 17, 1024
"""M for which `gemm_wgmma` pays. Below, other kernels are faster (H200, results/h200/sweeps/expand-gemm.csv). For 2,048
tokens a block of llama2-7b takes as long unpacked, for 4,096 9 % less (formats/tables/nvidia-h200.csv)."""

LANE_COLUMNS = 64
"""Columns per tile of each of a lane's two rows."""

HEADER_BYTES = 16
"""Bytes of a chunk's header: two halves of the mask, and the groups before the chunk and after it."""

HEADERS_AHEAD = 3
"""Tiles between the copy of a tile's headers and the copy of the tile: kAhead of wgmma_stream.cuh."""

MAX_STAGES = 4

RATES = Rates(expand_us=0.144, overlap=3.3)


def tiles_of(n: int, k: int, bits: int, size: int, full: bool = False) -> Tiles:
    """Return the tiles of a weight, as wgmma_tile.cuh lays them out in shared memory, or wgmma_full.cuh.

    Args:
        n: output features.
        k: input features.
        bits: bits per code.
        size: columns per group.
        full: whether no group is dropped and N is a multiple of 16.
    """
    columns = min(size, LANE_COLUMNS)
    chunks, parts = LANE_COLUMNS // columns, size // columns
    groups = 64 * chunks
    codes = -(-groups * size * bits // 8 // 16) * 16
    along_k = -(-k // (CHUNK_GROUPS * size))
    row_tiles, column_tiles = -(-n // CHUNK_ROWS), -(-along_k // chunks) * parts
    if full:
        return Tiles(row_tiles, column_tiles, codes + 3 * groups, max_stages=MAX_STAGES)
    return Tiles(
        row_tiles,
        column_tiles,
        # Each of the three tensors has 16 bytes more, because a copy begins at the multiple of 16 before its bytes.
        codes + 3 * groups + 48,
        extra_per_warp=(MAX_STAGES + HEADERS_AHEAD) * chunks * HEADER_BYTES,
        max_stages=MAX_STAGES,
    )


def pays(problem: Problem) -> bool:
    """Return whether `gemm_wgmma` is assumed to be faster than `gemm` and `unpack` on Hopper (which is not checked)."""
    return MIN_TOKENS <= problem.m <= MAX_TOKENS

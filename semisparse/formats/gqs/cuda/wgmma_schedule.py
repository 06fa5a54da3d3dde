"""How `gemm_wgmma.cu` divides a problem: its tiles, and the schedule that should be fastest."""

from __future__ import annotations

from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.expand_gemm import MAX_SPLIT_K, Schedule, Tiles, fit, tile_m_of

LANE_COLUMNS = 64
"""Columns of each of its two rows that a lane has per tile."""

HEADER_BYTES = 16

HEADERS_AHEAD = 3
"""Tiles whose headers are in shared memory before them: kAhead of wgmma_stream.cuh."""

MAX_STAGES = 4

SHAPES = {
    16: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    32: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    64: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    128: ((3, 1, 1), (2, 1, 1), (1, 1, 2)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1),),
}
"""By tile_m: warpgroups per CTA, CTAs per cluster and CTAs per SM worth trying, with Stream-K and split-K."""


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


def choose(m: int, weight: Tiles, bits: int, gpu: DeviceFacts) -> Schedule:
    """Choose the schedule of gemm_wgmma.cu: the fastest by `_microseconds` of those that fit.

    Args:
        m: the most tokens.
        weight: its tiles.
        bits: of a code.
        gpu: what it runs on.
    """
    tile_m = tile_m_of(m, SHAPES)
    most = min(MAX_SPLIT_K, weight.column_tiles)
    fitting = [
        schedule
        for warpgroups, cluster, ctas in SHAPES[tile_m]
        for split_k in range(0, most + 1)
        if (schedule := fit(weight, gpu, tile_m, warpgroups, cluster, split_k, ctas)) is not None
    ]
    return min(fitting, key=lambda schedule: _microseconds(schedule, m, weight, gpu.sms))


def _microseconds(schedule: Schedule, m: int, weight: Tiles, sms: int) -> float:
    """Estimate the time, by count: to compare schedules with."""
    ranges = schedule.ranges(m, weight, sms) * schedule.cluster
    iterations = schedule.tiles(m, weight) * schedule.cluster * weight.column_tiles / ranges
    busiest = -(-ranges // sms)
    waves = -(-busiest // schedule.ctas_per_sm)
    resident = min(busiest, schedule.ctas_per_sm) * schedule.warpgroups
    # Expanding takes some 700 instructions per warp and iteration; warpgroups share the issue slots and tensor cores.
    expanding = 0.36 * max(1.0, 2.5 / resident)
    tile = schedule.warpgroups * max(expanding, 0.0048 * schedule.tile_m)
    exchange = (1.5 + 0.012 * schedule.tile_m * schedule.warpgroups) if schedule.split_k != 1 else 0.0
    return busiest * iterations * tile + 3.0 * waves + exchange

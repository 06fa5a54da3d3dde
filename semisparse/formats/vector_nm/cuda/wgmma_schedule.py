"""How `gemm_wgmma.cu` divides a problem: its tiles, and the schedule that should be fastest."""

from __future__ import annotations

from semisparse.patterns import VectorNM
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.expand_gemm import COLUMNS, MAX_SPLIT_K, ROWS, Schedule, Tiles, fit, tile_m_of

SHAPES = {
    16: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    32: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    64: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    128: ((3, 1, 1), (2, 1, 1), (1, 1, 2)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1),),
}
"""By tile_m: warpgroups per CTA, CTAs per cluster and CTAs per SM worth trying, with Stream-K and split-K."""


def tiles_of(n: int, k: int, vectors: VectorNM) -> Tiles:
    """Return the tiles of a weight [N, K], as gemm_wgmma.cu lays them out in shared memory."""
    slots = COLUMNS // vectors.window * vectors.keep
    return Tiles(-(-n // ROWS), -(-k // COLUMNS), slots * ROWS * 2, extra_per_warp=16)


def choose(m: int, weight: Tiles, gpu: DeviceFacts) -> Schedule:
    """Choose the schedule of gemm_wgmma.cu: the fastest by `_microseconds` of those that fit.

    Args:
        m: the most tokens.
        weight: its tiles.
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
    tile = schedule.warpgroups * max(0.36 * max(1.0, 2.5 / resident), 0.0048 * schedule.tile_m)
    exchange = (1.5 + 0.012 * schedule.tile_m * schedule.warpgroups) if schedule.split_k != 1 else 0.0
    return busiest * iterations * tile + 3.0 * waves + exchange

"""Warps and stages of decode_tiles.cu: arithmetic on a problem and the sizes of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from semisparse.formats.base import WeightSpec
from semisparse.formats.ec_csr.storage.tiles import COLUMNS, MASK_UNITS, ROWS, UNIT, tile_shape
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts

TILE_MAX_TOKENS = 16

WARPS_PER_SM = {1: 24, 8: 24, 16: 16}
"""Maximum resident warps per SM by TILE_M: the kernels use up to 80, 80 and 113 registers per thread."""


@dataclass(frozen=True)
class TileSchedule:
    """How decode_tiles.cu computes y.

    Args:
        tile_m: maximum tokens (TILE_M), a key of `WARPS_PER_SM`.
        warps_n: row tiles that a CTA computes at a time.
        warps_k: warps per row tile, which split its column tiles among them (sliced-K).
        stages: weight tiles per warp in shared memory, in flight or being read.
        ctas: CTAs of the grid, at most as many as are resident; each strides over the row tiles.
        shared: bytes of dynamic shared memory per CTA.
    """

    tile_m: int
    warps_n: int
    warps_k: int
    stages: int
    ctas: int
    shared: int

    @property
    def warps(self) -> int:
        """Warps per CTA."""
        return self.warps_n * self.warps_k


def tile_bytes_of(spec: WeightSpec) -> int:
    """Return the bytes of shared memory per tile, and of one word per lane past the largest."""
    return (MASK_UNITS + int(spec.params["words_limit"])) * UNIT


def choose_tiles(problem: Problem, gpu: DeviceFacts) -> TileSchedule:
    """Choose the schedule of decode_tiles.cu; the last candidate fits every GPU."""
    candidates = (_preferred(problem, gpu.sms), (2, 6, 2), (1, 8, 1), (1, 4, 1), (1, 1, 1))
    fitting = (tile_schedule(problem, gpu, *candidate) for candidate in candidates)
    return next(schedule for schedule in fitting if schedule is not None)


def choose_fused_tiles(problem: Problem, gpu: DeviceFacts) -> TileSchedule | None:
    """Choose the schedule with a prologue and an epilogue; None if no schedule can fuse them."""
    gated = problem.epilogue == "silu_mul"
    if problem.k % 8 or (gated and problem.n % (2 * ROWS)):
        return None
    warps_n = 2 if gated else 1
    fitting = (tile_schedule(problem, gpu, warps_n, *rest, whole_x=True) for rest in ((8, 2), (4, 1)))
    return next((schedule for schedule in fitting if schedule is not None), None)


def _preferred(problem: Problem, sms: int) -> tuple[int, int, int]:
    """Return warps_n, warps_k and stages: the fastest on an H200 (results/h200/sweeps/ec_csr-tiles-decode.csv)."""
    row_tiles, column_tiles = tile_shape(problem.n, problem.k)
    m, few_rows = problem.m, row_tiles <= 2 * sms
    if column_tiles <= 6:
        return (1, 6, 2) if m <= 8 else (1, 3, 2)
    if column_tiles <= 16:
        if few_rows or m <= 2 or m > 8:
            return (1, 4, 2) if m == 1 and few_rows else (1, 8, 2)
        return 2, 6, 2
    if row_tiles <= sms:
        return (1, 12, 2) if m <= 8 else (1, 6, 2)  # two row tiles per CTA would leave half of the SMs idle
    if few_rows:
        return (2, 6, 2) if m <= 8 else (2, 4, 2)
    return (1, 16, 2) if m == 1 else (2, 6, 2) if m <= 8 else (8, 2, 2)


def tile_schedule(
    problem: Problem, gpu: DeviceFacts, warps_n: int, warps_k: int, stages: int, whole_x: bool = False
) -> TileSchedule | None:
    """Return the schedule with as many CTAs as are resident, or None if no CTA fits.

    With ``whole_x`` all of x is in shared memory, as in fused kernels.
    """
    row_tiles, column_tiles = tile_shape(problem.n, problem.k)
    tile_m = next(tokens for tokens in WARPS_PER_SM if problem.m <= tokens)
    warps_k = min(warps_k, column_tiles)
    warps = warps_n * warps_k
    x_tiles = column_tiles if whole_x else stages * warps_k
    # Weight tiles, x tiles and accumulators, double-buffered.
    shared = stages * warps * tile_bytes_of(problem.spec) + x_tiles * problem.m * 2 * COLUMNS
    shared += 2 * warps * tile_m * ROWS * 4
    resident = min(gpu.shared_per_sm // (shared + RESERVED_SHARED), WARPS_PER_SM[tile_m] // warps)
    if not resident:
        return None
    ctas = min(-(-row_tiles // warps_n), gpu.sms * resident)
    return TileSchedule(tile_m, warps_n, warps_k, stages, ctas, shared)

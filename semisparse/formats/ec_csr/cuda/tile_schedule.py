"""Warps and stages of decode_tiles.cu: arithmetic on a problem and the sizes of a GPU."""

from __future__ import annotations

from semisparse.formats.base import WeightSpec
from semisparse.formats.ec_csr.storage.tiles import MASK_UNITS, ROWS, UNIT, tile_shape
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.gemm_schedule import Tiles
from semisparse.runtime.tile_decode import Shape, TileSchedule, first_fitting

TILE_MAX_TOKENS = 16

WARPS_PER_SM = {1: 24, 8: 24, 16: 16}
"""Maximum resident warps per SM by TILE_M: the kernels use up to 80, 80 and 113 registers per thread."""


def tiles_in(spec: WeightSpec) -> Tiles:
    """Return a weight's tiles; their bytes of shared memory are those of the largest, and of one word more per lane."""
    return Tiles(*tile_shape(*spec.shape), (MASK_UNITS + int(spec.params["words_limit"])) * UNIT)


def choose_tiles(problem: Problem, gpu: DeviceFacts) -> TileSchedule:
    """Choose the schedule of decode_tiles.cu; the last candidate fits every GPU."""
    candidates = (_preferred(problem, gpu.sms), (2, 6, 2), (1, 8, 1), (1, 4, 1), (1, 1, 1))
    schedule = first_fitting(candidates, problem.m, tiles_in(problem.spec), WARPS_PER_SM, gpu)
    assert schedule is not None
    return schedule


def choose_fused_tiles(problem: Problem, gpu: DeviceFacts) -> TileSchedule | None:
    """Choose the schedule with a prologue and an epilogue; None if no schedule can fuse them."""
    gated = problem.epilogue == "silu_mul"
    if problem.k % 8 or (gated and problem.n % (2 * ROWS)):
        return None
    warps_n = 2 if gated else 1
    candidates = ((warps_n, 8, 2), (warps_n, 4, 1))
    return first_fitting(candidates, problem.m, tiles_in(problem.spec), WARPS_PER_SM, gpu, whole_x=True)


def _preferred(problem: Problem, sms: int) -> Shape:
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

"""Tile sizes, stages and split-K of the GPU kernels: pure arithmetic. The choices were the fastest on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from semisparse.formats.bitmask.storage.gpu import ROWS, Tiling
from semisparse.formats.kernel import ExpertsProblem, Problem
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.gemm_schedule import Rates, Tiles
from semisparse.runtime.tile_decode import Shape, TileSchedule, first_fitting, fit

Shapes = tuple[Shape, ...]

DECODE_MAX_TOKENS = 64

DECODE_WARPS_PER_SM = {1: 20, 8: 20, 16: 16, 32: 16, 64: 10}
"""Maximum resident warps per SM by TILE_M: the kernels use up to 96, 96, 128, 128 and 200 registers per thread."""

EXPERT_PAIRS = 16
"""Maximum pairs of a token and an expert for which each pair has CTAs of its own, not each expert."""

EXPERT_SHAPES: Mapping[int, Shapes] = {1: ((2, 2, 2),), 8: ((2, 4, 1),)}
"""By TILE_M: WARPS_N, WARPS_K and STAGES for a stack of experts, the best first (H200,
results/h200/sweeps/experts.csv)."""

EXPERT_SHAPES_GATED: Mapping[int, Shapes] = {1: ((2, 4, 1),), 8: ((2, 2, 2), (2, 4, 1))}
"""The same with SiLU, where a CTA has row tiles of both halves. For one token the best of a whole layer
(results/h200/sweeps/experts-one-token.csv): timed alone, other shapes are as fast."""

EXPERT_WAVES = 4
"""Waves of CTAs. Where a CTA has all pairs of an expert, some experts have more than others. For one token each CTA has
one group of row tiles then, and the next kernel's CTAs copy their weights as soon as the first ones end."""

GEMM_MIN_TOKENS = 17
"""Minimum M. Below it decode.cu is faster (H200, 32:64)."""

GEMM_MAX_TOKENS = {1 << 24: 2048, 1 << 22: 512, 0: 128}
"""Maximum M, by minimum N * K. Above it unpack.cu is faster, or nearly (H200, 32:64): at 2,048 tokens it takes .80 to
1.17 times as long (median 1.06), at 4,096 .84 to 1.05 (.98; formats/tables/nvidia-h200.csv)."""

GEMM_RATES = {
    0: Rates(expand_us=0.204, overlap=2.4),
    8: Rates(expand_us=0.198, overlap=1.8),
    4: Rates(expand_us=0.12, overlap=1.6),
}
"""By bits per code, 0 for values; the rates of codes are fitted to an earlier build of gemm.cuh
(results/h200/sweeps/bitmask-codes.csv)."""


def choose_decode(m: int, weight: Tiling, gpu: DeviceFacts) -> TileSchedule:
    """Choose the schedule of decode.cu.

    Args:
        m: maximum tokens, 1 to 64.
        weight: its tiles.
        gpu: what it runs on.
    """
    preferred = _preferred(m, weight, gpu.sms)
    # Later candidates need less shared memory, for patterns that keep many weights and small GPUs; the last one fits.
    candidates = (preferred, (2, 6, 2), (*preferred[:2], 1), (1, 4, 1), (1, 1, 1))
    schedule = first_fitting(candidates, m, weight, DECODE_WARPS_PER_SM, gpu)
    assert schedule is not None
    return schedule


def choose_fused(problem: Problem, weight: Tiling, gpu: DeviceFacts) -> TileSchedule | None:
    """Choose the schedule of decode.cu with a prologue and an epilogue; None if no schedule can fuse them.

    Args:
        problem: the matmul, its prologue and its epilogue.
        weight: its tiles.
        gpu: what it runs on.
    """
    gated = problem.epilogue == "silu_mul"
    if problem.k % 8 or (gated and problem.n % (2 * ROWS)):
        return None
    warps_n = 2 if gated else 1
    candidates = ((warps_n, 8, 2), (warps_n, 4, 1))
    return first_fitting(candidates, problem.m, weight, DECODE_WARPS_PER_SM, gpu, whole_x=True)


def fuses_silu(problem: ExpertsProblem, warps_n: int) -> bool:
    """Return whether decode.cu fuses SiLU: a CTA has pairs of row tiles, and copies x whole, in units of 16 bytes."""
    return problem.epilogue == "silu_mul" and problem.k % 8 == 0 and warps_n % 2 == 0


def choose_experts(problem: ExpertsProblem, weight: Tiling, gpu: DeviceFacts) -> TileSchedule:
    """Choose the schedule of decode.cu for a stack of experts: ``ctas`` for each, or for each pair if tile_m is 1.

    Args:
        problem: all experts' matmuls.
        weight: an expert's tiles.
        gpu: what it runs on.
    """
    pairs = problem.pairs
    m = 1 if pairs <= EXPERT_PAIRS else 8
    shapes = (EXPERT_SHAPES_GATED if fuses_silu(problem, 2) else EXPERT_SHAPES)[m]
    # Without SiLU x need not lie in shared memory whole, and the last fits always.
    candidates: Shapes = (*shapes, (1, 4, 1), (1, 1, 1))
    fitting = (fit(shape, m, weight, DECODE_WARPS_PER_SM, gpu, fuses_silu(problem, shape[0])) for shape in candidates)
    schedule = next(schedule for schedule in fitting if schedule is not None)
    resident = min(gpu.shared_per_sm // (schedule.shared + RESERVED_SHARED), DECODE_WARPS_PER_SM[m] // schedule.warps)
    slots = EXPERT_WAVES * resident * gpu.sms // min(pairs, problem.experts if m > 1 else pairs)
    ctas = max(1, min(slots, -(-weight.row_tiles // schedule.warps_n)))
    return replace(schedule, ctas=ctas)


def _preferred(m: int, weight: Tiling, sms: int) -> Shape:
    """Return warps_n, warps_k and stages."""
    row_tiles, column_tiles = weight.row_tiles, weight.column_tiles
    few_rows = row_tiles <= 2 * sms
    if m == 1 and weight.bits == 4:
        return (
            1,
            8,
            4,
        )  # the fastest of six at each of four sizes: a tile's arithmetic is shorter, so more are in flight
    if m > 32:
        return (2, 2, 1) if row_tiles <= 3 * sms else (8, 1, 2)
    if m > 16:
        return (2, 4, 1) if few_rows else (4, 2, 2)
    if column_tiles <= 6:
        return (1, 6, 2) if m <= 8 else (1, 3, 2)
    if column_tiles <= 16:
        # With at most `stages` column tiles per warp, x is copied only once: 8.4 us, else 10.5 (4096 x 4096, m = 8).
        return (1, 4, 2) if m == 1 and few_rows else (1, 8, 2)
    if row_tiles <= sms:
        return (1, 12, 2) if m <= 8 else (1, 6, 2)  # two row tiles per CTA would leave half of the SMs idle
    if m > 8:
        return 2, 4, 2
    if few_rows:
        return 2, 6, 2
    return (1, 16, 2) if m == 1 else (2, 8, 2)


def gemm_tiles(weight: Tiling) -> Tiles:
    """Return the tiles of gemm.cu, with what shared memory they take."""
    return Tiles(weight.row_tiles, weight.column_tiles, weight.tile_bytes, max_stages=3)


def gemm_pays(problem: Problem) -> bool:
    """Return whether no other kernel is clearly faster, as measured on an H200 at 32:64."""
    weights = problem.n * problem.k
    return GEMM_MIN_TOKENS <= problem.m <= next(most for fewest, most in GEMM_MAX_TOKENS.items() if weights >= fewest)

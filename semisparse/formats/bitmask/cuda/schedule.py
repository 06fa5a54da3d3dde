"""Tile sizes, stages and split-K of the GPU kernels: pure arithmetic. The choices were the fastest on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from semisparse.formats.bitmask.storage.codes import code_bits
from semisparse.formats.bitmask.storage.gpu import COLUMNS, ROWS, Tiling
from semisparse.formats.kernel import Problem
from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.expand_gemm import MAX_SPLIT_K, Rates, Schedule, Tiles, choose, fit, tile_m_of

OVERRUN = 256
"""Bytes of shared memory behind the last tile that may be read: kOverrun in tile.cuh."""

DECODE_MAX_TOKENS = 64

DECODE_WARPS_PER_SM = {1: 20, 8: 20, 16: 16, 32: 16, 64: 10}
"""By TILE_M, as registers allow: the kernels use up to 96, 96, 128, 128 and 200 per thread."""

GEMM_MIN_TOKENS = 17
"""Minimum M. Below it decode.cu is faster (H200, 32:64)."""

CODES_GEMM_MIN_TOKENS = 9
"""The same for codes in at least `CODES_LARGE` weights."""

CODES_LARGE = 1 << 27

GEMM_MAX_TOKENS = {1 << 24: 1024, 1 << 22: 512, 0: 128}
"""Maximum M, by minimum N * K. Above it unpack.cu is faster, or nearly (H200, 32:64)."""

GEMM_SPLIT_K = {32: ((1, 3),), 64: ((1, 3),), 128: ((3, 1), (2, 1), (1, 2)), 192: ((2, 1),), 256: ((2, 1),)}
"""By TILE_M: the warpgroups per CTA and CTAs per SM worth trying with split-K."""

GEMM_STREAM_K = (2, 2)
"""Warpgroups per CTA and CTAs per cluster with Stream-K; an SM has one CTA."""


CODE_RATES = {
    8: Rates(
        stream_k={
            16: ((4, 1, 1), (2, 1, 1), (1, 1, 1)),
            32: ((4, 1, 1), (2, 1, 1), (1, 1, 1)),
            64: ((4, 1, 1), (2, 1, 1), (1, 1, 1)),
            128: ((3, 1, 1), (2, 1, 1), (1, 1, 1)),
            192: ((2, 2, 1), (1, 2, 1)),
            256: ((2, 2, 1), (1, 2, 1)),
        },
        tile_us=0.156,
        token_us=0.00068,
    ),
    4: Rates(
        stream_k={
            16: ((1, 1, 3),),
            32: ((1, 1, 3),),
            64: ((1, 1, 3),),
            128: ((3, 1, 1),),
            192: ((2, 2, 1),),
            256: ((2, 2, 1),),
        },
        tile_us=0.08,
        token_us=0.00084,
    ),
}
"""By bits per code: rms error 9 and 10 %, 68 GEMMs each at 32:64 (results/h200/sweeps/bitmask-codes.csv)."""


@dataclass(frozen=True)
class DecodeSchedule:
    """How decode.cu computes y.

    Args:
        tile_m: maximum tokens (TILE_M), a key of `DECODE_WARPS_PER_SM`.
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


def choose_decode(m: int, weight: Tiling, gpu: DeviceFacts) -> DecodeSchedule:
    """Choose the schedule of decode.cu.

    Args:
        m: maximum tokens, 1 to 64.
        weight: its tiles.
        gpu: what it runs on.
    """
    preferred = _preferred(m, weight, gpu.sms)
    # The others need less shared memory, for dense patterns and small GPUs; the last always fits.
    candidates = (preferred, (2, 6, 2), (*preferred[:2], 1), (1, 4, 1), (1, 1, 1))
    fitting = (_decode_schedule(m, weight, gpu, *candidate) for candidate in candidates)
    return next(schedule for schedule in fitting if schedule is not None)


def choose_fused(problem: Problem, weight: Tiling, gpu: DeviceFacts) -> DecodeSchedule | None:
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
    candidates = [(warps_n, 8, 2), (warps_n, 4, 1)]
    fitting = (_decode_schedule(problem.m, weight, gpu, *candidate, True) for candidate in candidates)
    return next((schedule for schedule in fitting if schedule is not None), None)


def _preferred(m: int, weight: Tiling, sms: int) -> tuple[int, int, int]:
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


def _decode_schedule(
    m: int, weight: Tiling, gpu: DeviceFacts, warps_n: int, warps_k: int, stages: int, whole_x: bool = False
) -> DecodeSchedule | None:
    """Return the schedule with as many CTAs as are resident, or None if no CTA fits.

    With ``whole_x`` all of x is in shared memory, as in fused kernels.
    """
    tile_m = next(tokens for tokens in DECODE_WARPS_PER_SM if m <= tokens)
    warps_k = min(warps_k, weight.column_tiles)
    warps = warps_n * warps_k
    x_tiles = weight.column_tiles if whole_x else stages * warps_k
    # Weight tiles, x tiles and accumulators, double-buffered.
    shared = stages * warps * weight.tile_bytes + x_tiles * m * 2 * COLUMNS + 2 * warps * tile_m * ROWS * 4
    resident = min(gpu.shared_per_sm // (shared + RESERVED_SHARED), DECODE_WARPS_PER_SM[tile_m] // warps)
    if not resident:
        return None
    ctas = min(-(-weight.row_tiles // warps_n), gpu.sms * resident)
    return DecodeSchedule(tile_m, warps_n, warps_k, stages, ctas, shared)


def gemm_tiles(weight: Tiling) -> Tiles:
    """Return the tiles of gemm.cu, with what shared memory they take."""
    return Tiles(weight.row_tiles, weight.column_tiles, weight.tile_bytes, extra=OVERRUN, max_stages=3)


def gemm_pays(problem: Problem) -> bool:
    """Return whether no other kernel is clearly faster, as measured on an H200 at 32:64."""
    weights = problem.n * problem.k
    few = CODES_GEMM_MIN_TOKENS if code_bits(problem.params) and weights >= CODES_LARGE else GEMM_MIN_TOKENS
    return few <= problem.m <= next(most for fewest, most in GEMM_MAX_TOKENS.items() if weights >= fewest)


def choose_gemm(m: int, weight: Tiles, gpu: DeviceFacts, bits: int = 0) -> Schedule:
    """Choose the schedule of gemm.cu: by estimate the fastest of those that fit.

    Args:
        m: maximum tokens.
        weight: its tiles.
        gpu: what it runs on.
        bits: per code; 0 for values.
    """
    if bits:
        return choose(m, weight, gpu, CODE_RATES[bits])
    tile_m = tile_m_of(m, GEMM_SPLIT_K)
    most = min(MAX_SPLIT_K, weight.column_tiles)
    candidates = [(w, 1, split_k, ctas) for w, ctas in GEMM_SPLIT_K[tile_m] for split_k in range(1, most + 1)]
    candidates.append((*GEMM_STREAM_K, 0, 1))
    fitting = [schedule for c in candidates if (schedule := fit(weight, gpu, tile_m, *c)) is not None]
    return min(fitting, key=lambda schedule: _h200_microseconds(schedule, m, weight, gpu.sms))


def _h200_microseconds(schedule: Schedule, m: int, weight: Tiles, sms: int) -> float:
    """Estimate the time on an H200 at 32:64. Rms error, M 32 to 2,048: 6 % (476 split-K GEMMs), 4 % (74 Stream-K)."""
    tokens = schedule.tile_m / 64
    ranges = schedule.ranges(m, weight, sms)
    if not schedule.split_k:
        iterations = schedule.warpgroups * schedule.tiles(m, weight) * weight.column_tiles / ranges
        return 8.4 + iterations * (0.61 + 0.227 * tokens) + 0.94 * schedule.warpgroups * tokens
    busiest = -(-ranges // sms)  # CTAs of the busiest SM
    waves = -(-busiest // schedule.ctas_per_sm)
    iterations = -(-weight.column_tiles // schedule.split_k)
    warpgroups = busiest * schedule.warpgroups
    exchange = 1.57 + 0.61 * warpgroups * tokens if schedule.split_k > 1 else 0.0
    return 1.03 * (warpgroups * iterations * (0.477 + 0.197 * tokens) + waves * (3.2 + 0.52 * iterations) + exchange)


@dataclass(frozen=True)
class UnpackSchedule:
    """How unpack.cu writes the dense weight.

    Args:
        warps: warps per CTA; each expands one tile at a time.
        stages: weight tiles per warp in shared memory: 2, or 1 where 2 do not fit (59:64 and more on Ada).
        ctas: CTAs of the grid, at most 3 per SM: 12 warps with 18 KB of shared memory each at 32:64.
        shared: bytes of dynamic shared memory per CTA.
    """

    warps: int
    stages: int
    ctas: int
    shared: int


def choose_unpack(weight: Tiling, gpu: DeviceFacts) -> UnpackSchedule:
    """Return the schedule of unpack.cu."""
    warps, dense_tile = 4, ROWS * 4 * (64 * 2 + 16)  # bytes: 4 padded blocks of 64 columns per row
    shared = {stages: warps * (stages * weight.tile_bytes + dense_tile) + OVERRUN for stages in (1, 2)}
    stages = 2 if shared[2] <= gpu.shared_per_cta else 1
    ctas = min(-(-weight.row_tiles * weight.column_tiles // warps), 3 * gpu.sms)
    return UnpackSchedule(warps, stages, ctas, shared[stages])

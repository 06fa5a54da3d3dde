"""The tiles of gemm_wgmma.cu and their measured rates."""

from __future__ import annotations

from dataclasses import replace

from semisparse.formats.kernel import Problem
from semisparse.patterns import VectorNM
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.gemm_schedule import (
    COLUMNS,
    MAX_TOKENS_OF_TWO_PRODUCERS,
    ROWS,
    Rates,
    Schedule,
    Tiles,
    choose,
    fit,
    h200_microseconds,
    tile_m_of,
)

MIN_TOKENS, MAX_TOKENS = 17, 2048
"""M for which `gemm_wgmma` pays. Below, `decode_tensor` is faster (H200, results/h200/sweeps/expand-gemm.csv). A block
of llama2-7b takes 5 % less unpacked for 4,096 tokens, 6 % more for 2,048 (formats/tables/nvidia-h200.csv)."""

RATES = Rates(expand_us=0.182, overlap=2.7)

RATES_OF_TWO_PRODUCERS = Rates(expand_us=0.155, overlap=2.7)
"""With two producer warpgroups beside three consumer warpgroups: fitted to 79.9 us for 32 tokens and 87.0 for 64 at
28672 x 8192 (results/h200/sweeps/few-tokens.csv)."""


def tiles_of(n: int, k: int, vectors: VectorNM) -> Tiles:
    """Return the tiles of a weight [N, K], as gemm_wgmma.cu lays them out in shared memory."""
    slots = COLUMNS // vectors.window * vectors.keep
    masks = COLUMNS // 8  # bytes: a bit per column
    return Tiles(-(-n // ROWS), -(-k // COLUMNS), slots * ROWS * 2 + masks, extra_per_warp=16)


def choose_schedule(m: int, weight: Tiles, gpu: DeviceFacts, constant: bool = False) -> Schedule:
    """Choose the schedule: that of `choose`, or Stream-K with two producer warpgroups if that should be faster.

    Microseconds on an H200 with one producer warpgroup (two) at 28672 x 8192: 88.6 (76.9) for 16 tokens, 93 (79.9) for
    32 and 101 (87.0) for 64. At 4096 x 4096 three small CTAs per SM, which have one each, take 11.7 (13.2) for 32.
    """
    one = choose(m, weight, gpu, RATES, constant)
    tile_m = tile_m_of(m)
    two = fit(replace(weight, slow_copies=True), gpu, tile_m, 3, 1, 0, 1)
    if two is None or tile_m > MAX_TOKENS_OF_TWO_PRODUCERS:
        return one
    with_one = h200_microseconds(one, m, weight, gpu.sms, RATES)
    return two if h200_microseconds(two, m, weight, gpu.sms, RATES_OF_TWO_PRODUCERS) < with_one else one


def pays(problem: Problem) -> bool:
    """Return whether `gemm_wgmma` is expected to be the fastest kernel; `gemm_sparse` is preferred where it pays."""
    return MIN_TOKENS <= problem.m <= MAX_TOKENS

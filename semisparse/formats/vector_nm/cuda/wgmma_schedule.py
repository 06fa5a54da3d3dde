"""The tiles of gemm_wgmma.cu and their measured rates."""

from __future__ import annotations

from semisparse.formats.kernel import Problem
from semisparse.patterns import VectorNM
from semisparse.runtime.expand_gemm import COLUMNS, ROWS, Rates, Tiles

MIN_TOKENS, MAX_TOKENS = 17, 1024
"""M for which `gemm_wgmma` pays. Below, `decode_tensor` is faster (H200, results/h200/sweeps/expand-gemm.csv); larger M
was not timed."""

RATES = Rates(expand_us=0.182, overlap=2.7)


def tiles_of(n: int, k: int, vectors: VectorNM) -> Tiles:
    """Return the tiles of a weight [N, K], as gemm_wgmma.cu lays them out in shared memory."""
    slots = COLUMNS // vectors.window * vectors.keep
    masks = COLUMNS // 8  # bytes: a bit per column
    return Tiles(-(-n // ROWS), -(-k // COLUMNS), slots * ROWS * 2 + masks, extra_per_warp=16)


def pays(problem: Problem) -> bool:
    """Return whether `gemm_wgmma` is expected to be the fastest kernel; `gemm_sparse` is preferred where it pays."""
    return MIN_TOKENS <= problem.m <= MAX_TOKENS

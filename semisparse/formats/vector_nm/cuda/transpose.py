"""Transpose x in float16 or bfloat16 for `gemm_sparse` (transpose.cu)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.runtime.kernel import CudaSource

THREADS = 256
TILE_M = TILE_COLUMNS = 64
"""Tokens and columns per CTA."""

SOURCE = CudaSource(
    Path(__file__).with_name("transpose.cu"), tuple({"TILE_M": TILE_M, "ALIGNED": aligned} for aligned in (1, 0))
)


def prepare(problem: Problem, tile_m: int) -> Callable[[Tensor], Tensor]:
    """Return the function that transposes x.

    Args:
        tile_m: the tokens of x_t are padded to a multiple of it.
    Returns:
        x [M, K], 16 bits, aligned to 16 bytes -> x_t [K padded to whole windows, M padded], zeros past K and M.
    """
    k, window = problem.k, vectors_of(problem.pattern).window
    width = -(-k // window) * window
    defines = {"TILE_M": TILE_M, "ALIGNED": int(k % 8 == 0)}
    build = SOURCE.build("semisparse_vector_nm_transpose", defines, TILE_M * TILE_COLUMNS * 2)
    kernel = build.load(problem.device)

    def transpose(x: Tensor) -> Tensor:
        m = x.shape[0]
        pitch = -(-m // tile_m) * tile_m
        x_t = x.new_empty(width, pitch)
        grid = (-(-width // TILE_COLUMNS), -(-pitch // TILE_M), 1)
        kernel(grid, THREADS, x=x, x_t=x_t, m=m, k=k, columns=width, pitch=pitch)
        return x_t

    return transpose

"""What a product costs, for the roofline model."""

from __future__ import annotations

from semisparse.formats.bitmask import cuda, gemm, tiled, tiles
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.formats.kernel import Pass, Problem, fused_cost


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: fused for few tokens, an unpacking pass first for many."""
    tiled_there = values_per_block(problem.pattern) is not None and problem.weight_dtype in tiles.DTYPES
    fused = tiled_there and gemm.pays(problem)  # on Hopper
    if fused or problem.m <= (tiled if tiled_there else cuda).MAX_DECODE_TOKENS:
        return fused_cost(problem, weight_bytes)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))

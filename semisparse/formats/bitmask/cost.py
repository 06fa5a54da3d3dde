"""The passes of a matmul for the roofline model."""

from __future__ import annotations

from semisparse.formats.bitmask.cuda.schedule import DECODE_MAX_TOKENS, gemm_pays
from semisparse.formats.bitmask.storage import gpu
from semisparse.formats.bitmask.storage.codes import code_bits
from semisparse.formats.kernel import Pass, Problem, one_pass_cost
from semisparse.runtime import row_matmul


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes: one where a kernel reads the packed weight itself, else unpacking and a dense GEMM."""
    if problem.device.type != "cpu" and code_bits(problem.params) == 4 and not gpu.refusal(problem.spec):
        tiles = gpu.tiling(problem.spec)  # without masks, a code per column
        weight_bytes = tiles.row_tiles * tiles.column_tiles * tiles.tile_bytes
    if _is_fused(problem):
        return one_pass_cost(problem, weight_bytes)
    dense_bytes = problem.n * problem.k * problem.spec.dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *one_pass_cost(problem, dense_bytes))


def _is_fused(problem: Problem) -> bool:
    if problem.device.type == "cpu":
        return problem.m <= row_matmul.MAX_TOKENS[row_matmul.operand_dtype(problem.dtype, problem.weight_dtype)]
    if gpu.refusal(problem.spec):
        return False
    return problem.m <= DECODE_MAX_TOKENS or gemm_pays(problem)  # as on Hopper: elsewhere gemm does not run

"""The cost of a matmul on a GPU for the roofline: the operations of kept weights; for many tokens x is transposed."""

from __future__ import annotations

import torch

from semisparse.formats.kernel import Pass, Problem, one_pass_cost
from semisparse.formats.vector_nm.cuda.decode_schedule import MAX_M, TENSOR_VECTOR_LENGTHS, TILE_M, VECTOR_LENGTHS
from semisparse.formats.vector_nm.cuda.schedule import MAX_DENSITY, choose_gemm
from semisparse.formats.vector_nm.cuda.wgmma_schedule import pays as wgmma_pays
from semisparse.formats.vector_nm.storage.disk import vectors_of

ASSUMED_SMS = 128
"""SMs of the GPU that the cost is for. Only the tile of small matmuls depends on it."""

WGMMA_UNPACKING = 13
"""Operations of `gemm_wgmma` per weight, kept or not."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes of a matmul: transposing x where the kernel needs it, then one kernel on the packed weight.

    Where no kernel supports the vectors, or cuBLAS is faster, the passes are unpacking and a dense GEMM. The strategy
    of a tiled GEMM says whether columns are packed, and a CTA's arithmetic intensity (equation 3).
    """
    pattern = vectors_of(problem.pattern)
    m, n, k, itemsize = problem.m, problem.n, problem.k, problem.dtype.itemsize
    operations = 2 * m * n * k * pattern.density
    operands = weight_bytes + m * (n + k) * itemsize
    if problem.dtype != torch.float32 and m <= MAX_M and pattern.length in VECTOR_LENGTHS:
        if pattern.length in TENSOR_VECTOR_LENGTHS:
            return (Pass(operands, operations, "tensor fp16"),)
        rereads = (-(-m // TILE_M[-1]) - 1) * weight_bytes
        return (Pass(operands + rereads, operations, "fp32"),)
    if itemsize == 2 and wgmma_pays(problem) and pattern.length % 16 == 0 and 32 % pattern.window == 0:  # on Hopper
        return (Pass(2 * m * k * itemsize, 0, "fp32"), *one_pass_cost(problem, weight_bytes, WGMMA_UNPACKING * n * k))
    schedule = choose_gemm(pattern, m, n, problem.dtype, ASSUMED_SMS)
    too_dense = itemsize == 2 and pattern.density > MAX_DENSITY
    if schedule is None or too_dense or problem.dtype != problem.weight_dtype:
        dense = n * k * itemsize
        return (Pass(weight_bytes + dense, 0, "fp32", "unpacked"), *one_pass_cost(problem, dense))
    packing = "packing" if schedule.packed else "non-packing"
    strategy = f"{packing}, {schedule.intensity(pattern, k):.0f} FLOP/byte per CTA"
    unit = "fp32" if problem.dtype == torch.float32 else "tensor fp16"
    return (Pass(2 * m * k * itemsize, 0, "fp32"), Pass(operands, operations, unit, strategy))

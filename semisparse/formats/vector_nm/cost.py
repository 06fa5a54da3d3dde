"""What a product costs on a GPU, for the roofline: the kept weights' operations; x transposed for many tokens."""

from __future__ import annotations

import torch

from semisparse.formats.kernel import Pass, Problem, fused_cost
from semisparse.formats.vector_nm import decode_tensor
from semisparse.formats.vector_nm.cuda import DECODE_LENGTHS, MAX_DECODE_TOKENS, TOKENS
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.tiled import MOST_DENSITY
from semisparse.formats.vector_nm.tiling import choose_tiling

PROCESSORS = 128
"""Assumed of a card: only the tile of small products depends on it."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product, those of the kernels that it is made for.

    The strategy names the staging of x and the intensity of a block (equation 3); where no kernel takes the vectors, or
    the dense product is faster, the weight is unpacked for that.
    """
    pattern = vectors_of(problem.pattern)
    m, n, k, itemsize = problem.m, problem.n, problem.k, problem.dtype.itemsize
    operations = 2 * m * n * k * pattern.density
    operands = weight_bytes + m * (n + k) * itemsize
    if problem.dtype != torch.float32 and m <= MAX_DECODE_TOKENS and pattern.length in DECODE_LENGTHS:
        if pattern.length in decode_tensor.LENGTHS:
            return (Pass(operands, operations, "tensor fp16"),)
        rereads = (-(-m // TOKENS[-1]) - 1) * weight_bytes
        return (Pass(operands + rereads, operations, "fp32"),)
    tiling = choose_tiling(pattern, m, n, itemsize, PROCESSORS)
    too_dense = itemsize == 2 and pattern.density > MOST_DENSITY
    if tiling is None or too_dense or problem.dtype != problem.weight_dtype:
        dense = n * k * itemsize
        return (Pass(weight_bytes + dense, 0, "fp32", "unpacked"), *fused_cost(problem, dense))
    way = "packing" if tiling.packed else "non-packing"
    strategy = f"{way}, {tiling.intensity(pattern, k):.0f} FLOP/byte a block"
    unit = "fp32" if problem.dtype == torch.float32 else "tensor fp16"
    return (Pass(2 * m * k * itemsize, 0, "fp32"), Pass(operands, operations, unit, strategy))

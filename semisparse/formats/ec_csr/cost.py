"""The passes of a matmul for the roofline model: one over the lists for few tokens, else unpacking and a dense GEMM."""

from __future__ import annotations

from semisparse.formats.kernel import Pass, Problem, one_pass_cost

MAX_DECODE_TOKENS = 16

UNPACKING = 14
"""Operations on fp32 units per kept weight and token. Measured on an H200 for `decode_mma` at 8 and 16 tokens: 10 to
18."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes of a matmul."""
    if problem.m <= MAX_DECODE_TOKENS:
        kept = problem.n * problem.k * problem.pattern.density
        return one_pass_cost(problem, weight_bytes, UNPACKING * problem.m * kept)
    dense_bytes = problem.n * problem.k * problem.weight_dtype.itemsize
    return (Pass(weight_bytes + dense_bytes, 0, "fp32"), *one_pass_cost(problem, dense_bytes))

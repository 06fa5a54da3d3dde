"""The passes of a matmul for the roofline model."""

from __future__ import annotations

from semisparse.formats.dense.storage.disk import kind_of
from semisparse.formats.kernel import Pass, Problem, one_pass_cost

UNPACKING_INT4 = 3.5
"""fp32 operations per weight and token, from the times of torch's int4 GEMM on an H200 from 64 tokens on."""

UNITS = {"int8": "tensor int8", "fp8": "tensor fp8", "fp8_tensor": "tensor fp8"}


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes; 8-bit kinds quantise the activations first."""
    kind = kind_of(problem.params)
    m, n, k = problem.m, problem.n, problem.k
    if kind is None or kind == "int4":
        return one_pass_cost(problem, weight_bytes, 0 if kind is None else UNPACKING_INT4 * m * n * k)
    width = problem.dtype.itemsize
    quantising = Pass(m * k * (width + 1), 0, "fp32")
    return (quantising, Pass(weight_bytes + m * k + m * n * width, 2 * m * n * k, UNITS[kind]))

"""The passes of a matmul for the roofline model."""

from __future__ import annotations

import torch

from semisparse.formats.kernel import Pass, Problem, one_pass_cost
from semisparse.formats.slide24.cpu import kernel as cpu
from semisparse.formats.slide24.cuda import gemm
from semisparse.formats.slide24.storage.disk import lifted_columns, quantised_dtype, value_dtype, window_of

UNITS = {torch.int8: "tensor int8", torch.float8_e4m3fn: "tensor fp8"}

REACHED = {"tensor int8": 0.86, "tensor fp8": 0.7, "tensor fp16": 0.65}
"""Fraction of twice the dense peak that ``gemm`` reaches at 4,096 and 8,192 tokens, measured on an H200."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes of a matmul: lift, then the 2:4 GEMM; or unpack, then a dense GEMM; or the CPU kernel.

    Sparse tensor cores compute two columns in the time that dense ones take for one: K' / 2 columns count.
    """
    m, n, k, width = problem.m, problem.n, problem.k, problem.dtype.itemsize
    operands, operations = m * (n + k) * width, 2 * m * n * k
    if problem.device.type == "cpu" and not cpu.uses_torch_matmul(m, problem.spec):
        dtype = quantised_dtype(problem.params)
        # No operations are counted. The unit tells the bench how large an error rounding x may cause.
        quantising = (Pass(m * k * (width + dtype.itemsize), 0, UNITS[dtype]),) if dtype else ()
        return (*quantising, Pass(weight_bytes + operands, operations, "fp32"))
    if problem.device.type == "cpu" or torch.float32 in (problem.weight_dtype, problem.dtype):
        dense_bytes = 4 * n * k
        return Pass(weight_bytes + dense_bytes, 0, "fp32"), Pass(dense_bytes + operands, operations, "fp32")
    if not gemm.pays(problem):
        dense_bytes = n * k * problem.weight_dtype.itemsize
        return Pass(weight_bytes + dense_bytes, 0, "fp32", "unpacked"), *one_pass_cost(problem, dense_bytes)
    stored = value_dtype(problem.spec)
    unit, columns = UNITS.get(stored, "tensor fp16"), lifted_columns(k, window_of(problem.pattern))
    lifted = m * columns * stored.itemsize
    lifting = Pass(m * k * width + lifted, 0, "fp32", "sparse")
    return lifting, Pass(weight_bytes + lifted + m * n * width, m * n * columns, unit, reached=REACHED[unit])

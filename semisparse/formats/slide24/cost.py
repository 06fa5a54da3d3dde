"""What a product costs, for the roofline model."""

from __future__ import annotations

import torch

from semisparse.formats.kernel import Pass, Problem, fused_cost
from semisparse.formats.slide24 import cpu, gpu
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.pack import stored_dtype, window_of

UNITS = {torch.int8: "tensor int8", torch.float8_e4m3fn: "tensor fp8"}

REACHED = {"tensor int8": 0.86, "tensor fp8": 0.7, "tensor fp16": 0.65}
"""Of twice the dense rate, by the times of `hopper` at 4,096 and 8,192 tokens on an H200."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product: lift, then multiply on sparse tensor cores. A CPU multiplies row by row.

    Sparse tensor cores compute two columns in the time that dense ones take for one: K' / 2 columns count.
    """
    m, n, k = problem.m, problem.n, problem.k
    width = problem.dtype.itemsize
    dtype = stored_dtype(problem.params)
    unit = UNITS.get(dtype, "tensor fp16") if dtype else "tensor fp16"
    if problem.device.type != "cuda" or (torch.float32 in (problem.weight_dtype, problem.dtype)):
        rounding = (Pass(m * k * (width + dtype.itemsize), 0, unit),) if dtype in UNITS else ()
        operands = m * (n + k) * width
        if problem.device.type == "cpu" and (dtype or m <= cpu.MAX_TOKENS):
            return (*rounding, Pass(weight_bytes + operands, 2 * m * n * k, "fp32"))
        dense_bytes = 4 * n * k
        unpacking = Pass(weight_bytes + dense_bytes, 0, "fp32")
        return (*rounding, unpacking, Pass(dense_bytes + operands, 2 * m * n * k, "fp32"))
    if not gpu.tiles_pay(problem):
        dense_bytes = n * k * problem.weight_dtype.itemsize
        return (Pass(weight_bytes + dense_bytes, 0, "fp32", "unpacked"), *fused_cost(problem, dense_bytes))
    columns = lifted_columns(k, window_of(problem.pattern))
    stored = (dtype or problem.weight_dtype).itemsize
    lifting = Pass(m * (k * width + columns * stored), 0, "fp32", "sparse")
    moved = weight_bytes + m * (columns * stored + n * width)
    return (lifting, Pass(moved, m * n * columns, unit, reached=REACHED[unit]))

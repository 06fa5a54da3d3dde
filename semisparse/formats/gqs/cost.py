"""The passes of a matmul for the roofline model."""

from __future__ import annotations

from dataclasses import replace

from semisparse.formats.gqs.cpu.kernel import MAX_TOKENS
from semisparse.formats.gqs.cuda.decode import weight_refusal
from semisparse.formats.gqs.cuda.schedule import CODE_TOKENS
from semisparse.formats.gqs.storage.disk import quantises_x
from semisparse.formats.kernel import Pass, Problem, fused_cost
from semisparse.quant.group import KINDS

UNPACKING = {4: (13, 1), 8: (24, 0.5)}
"""By bits, operations of `decode` per kept weight, and per kept weight and token, on an H200."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes: quantising x (``w4a8``), then one over the packed bytes, or unpacking and a dense GEMM."""
    m, n, k = problem.m, problem.n, problem.k
    on_gpu = problem.device.type == "cuda"
    fused = weight_refusal(problem) is None if on_gpu else m <= MAX_TOKENS
    per_weight, per_token = UNPACKING.get(KINDS[str(problem.params["kind"])], (0, 0))
    fused_passes = fused_cost(problem, weight_bytes, (per_weight + per_token * m) * n * k * problem.pattern.density)
    passes: list[Pass] = []
    if quantises_x(problem.params):
        if on_gpu and fused and m <= CODE_TOKENS[-1]:  # `decode` quantises these itself
            return (replace(*fused_passes, unit="tensor int8"),)
        passes.append(Pass(m * k * (problem.dtype.itemsize + 1), 0, "tensor int8"))
    if fused:
        return (*passes, *fused_passes)
    dense_bytes = n * k * problem.weight_dtype.itemsize
    return (*passes, Pass(weight_bytes + dense_bytes, 0, "fp32"), *fused_cost(problem, dense_bytes))

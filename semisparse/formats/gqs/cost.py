"""The passes of a matmul for the roofline model."""

from __future__ import annotations

from dataclasses import replace

from semisparse.formats.gqs.cuda import full_schedule
from semisparse.formats.gqs.cuda.decode import weight_refusal
from semisparse.formats.gqs.cuda.gemm_schedule import decode_pays, gemm_pays, shape_refusal
from semisparse.formats.gqs.cuda.schedule import CODE_TOKENS
from semisparse.formats.gqs.cuda.wgmma_schedule import pays as wgmma_pays
from semisparse.formats.gqs.storage.disk import quantises_x
from semisparse.formats.kernel import Pass, Problem, one_pass_cost
from semisparse.quant.group import KINDS
from semisparse.runtime import row_matmul

DECODE_UNPACKING = {4: (13, 1), 8: (24, 0.5)}
"""Operations on fp32 units of `decode` per kept weight, and per kept weight and token, by bits (H200)."""

GEMM_UNPACKING = {2: 9, 3: 10.5, 4: 11, 8: 18}
"""Operations of `gemm` per weight, kept or not, by bits; fitted to 8 and 64 tokens at 28672 x 8192 (H200)."""

GEMM_PER_TOKEN = 0.27
"""Further operations of `gemm` per weight and token: mma.sync is slower than the wgmma of the peak rate."""

FULL_UNPACKING = {2: 8.3, 3: 12.3, 4: 8.5, 8: 14}
"""Operations of `full` per weight, by bits; fitted to 8 tokens at 28672 x 8192 (H200). That of 8 bits is assumed."""

WGMMA_UNPACKING = {2: 8, 3: 10, 4: 9.5, 8: 11.5}
"""Operations of `gemm_wgmma` per weight, kept or not, by bits. From some 64 tokens on they are hidden behind wgmma."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Return the passes: quantising x (``w4a8``), then one kernel on the packed weight, or unpacking and a dense GEMM.

    Every GPU is assumed to run `gemm_wgmma` (Hopper).
    """
    m, n, k = problem.m, problem.n, problem.k
    on_gpu = problem.device.type == "cuda"
    decodes = on_gpu and decode_pays(problem) and weight_refusal(problem) is None
    passes: list[Pass] = []
    if quantises_x(problem.params):
        if decodes and m <= CODE_TOKENS[-1]:  # `decode` quantises x itself
            return (replace(*one_pass_cost(problem, weight_bytes, _unpacking(problem, decodes)), unit="tensor int8"),)
        passes.append(Pass(m * k * (problem.dtype.itemsize + 1), 0, "tensor int8"))
    expands = (gemm_pays(problem) or wgmma_pays(problem)) and shape_refusal(problem) is None
    if on_gpu and not decodes and full_schedule.pays(problem) and full_schedule.shape_refusal(problem) is None:
        unpacking = FULL_UNPACKING[KINDS[str(problem.params["kind"])]] * n * k
        return (*passes, *one_pass_cost(problem, weight_bytes, unpacking))
    operand = row_matmul.operand_dtype(problem.dtype, problem.weight_dtype, not quantises_x(problem.params))
    fused = (decodes or expands) if on_gpu else m <= row_matmul.MAX_TOKENS[operand]
    if fused:
        return (*passes, *one_pass_cost(problem, weight_bytes, _unpacking(problem, decodes)))
    dense_bytes = n * k * problem.weight_dtype.itemsize
    return (*passes, Pass(weight_bytes + dense_bytes, 0, "fp32"), *one_pass_cost(problem, dense_bytes))


def _unpacking(problem: Problem, decodes: bool) -> float:
    """Return the operations with which `decode`, `gemm` or `gemm_wgmma` finds and dequantises weights."""
    bits, weights = KINDS[str(problem.params["kind"])], problem.n * problem.k
    if wgmma_pays(problem):
        return WGMMA_UNPACKING[bits] * weights
    if not decodes:
        return (GEMM_UNPACKING[bits] + GEMM_PER_TOKEN * problem.m) * weights
    per_weight, per_token = DECODE_UNPACKING[bits]
    return (per_weight + per_token * problem.m) * weights * problem.pattern.density

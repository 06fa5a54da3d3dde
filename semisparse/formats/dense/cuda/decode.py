"""decode.cu: a GEMV with a 16-bit weight for 1 to 16 tokens, bound by reading the weight."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned, bias_as

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

MAX_TOKENS = 16

WARPS = 8

STEPS = {1: 4, 2: 2}
"""Steps that a warp has in flight, 2 KB of weights each, by N8_TILES (tiles of 8 tokens). Registers limit them."""

CTAS_PER_SM = 2
"""Resident CTAs per SM; registers are limited so that they fit."""

SHARED_X_BYTES = 72 << 10
"""Maximum bytes of x that a CTA of a fused kernel keeps in shared memory: an SM has two such CTAs."""

ROWS, STEP_COLUMNS = 16, 64
"""Rows of a row tile, and columns of a warp's step: kTileRows and kStepColumns in decode.cu."""

UNFUSED: Defines = {"RMS_NORM": 0, "ADD_RESIDUAL": 0, "SILU_MUL": 0}


def _defines(dtype: torch.dtype, n8_tiles: int, fusion: Defines = UNFUSED) -> Defines:
    sizes = {"N8_TILES": n8_tiles, "WARPS": WARPS, "STEPS": STEPS[n8_tiles], "CTAS_PER_SM": CTAS_PER_SM}
    return {"SCALAR": SCALARS[dtype], **sizes, **fusion}


SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        *(_defines(dtype, tiles) for dtype in SCALARS for tiles in (1, 2)),
        _defines(torch.bfloat16, 1, {**UNFUSED, "RMS_NORM": 1}),
        _defines(torch.float16, 1, {**UNFUSED, "RMS_NORM": 1, "SILU_MUL": 1}),
        _defines(torch.bfloat16, 1, {**UNFUSED, "ADD_RESIDUAL": 1}),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.params:
        return f"supports unquantised weights only; this weight is {problem.params['kind']}"
    if problem.dtype not in SCALARS or problem.spec.dtype != problem.dtype:
        return f"takes float16 or bfloat16, x and w alike, got {problem.dtype} and {problem.spec.dtype}"
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.k % 8:
        return f"loads 8 columns at once, K is {problem.k}"
    return cuda_refusal(problem.device)


def pays(problem: Problem) -> bool:
    """Return whether it is faster than cuBLAS: from one row tile per SM on, and for 3 tokens or more only up to four.

    Microseconds of this kernel / of cuBLAS on an H200, for one token: N x K = 4096 x 4096 10.9 / 12.8, 4096 x 11008
    24.5 / 26.9, 32000 x 4096 66.6 / 74.7, 22016 x 4096 equal, 1536 x 8960 13.2 / 11.8; for eight tokens: 22016 x 4096
    50.8 / 47.9.
    """
    row_tiles = -(-problem.n // ROWS)
    over_four_per_sm = row_tiles > 4 * device_facts(problem.device).sms
    return row_tiles >= device_facts(problem.device).sms and (problem.m <= 2 or not over_four_per_sm)


def prepare(problem: Problem) -> Product:
    """Compile and load the kernel for one problem; accumulators are float32."""
    return _prepared(problem)


def fuse(problem: Problem) -> FusedProduct | None:
    """Return the matmul of `prepare` with prologue and epilogue fused.

    None if x is too large for shared memory, or if the epilogue is SiLU and N is not a multiple of 16.
    """
    uneven_halves = problem.epilogue == "silu_mul" and problem.n % ROWS
    return None if _shared_x(problem) > SHARED_X_BYTES or uneven_halves else _prepared(problem)


def _shared_x(problem: Problem) -> int:
    """Return the bytes of x that a CTA keeps in shared memory."""
    return 2 * problem.m * _steps(problem) * WARPS * STEP_COLUMNS if problem.is_fused else 0


def _steps(problem: Problem) -> int:
    """Return a warp's steps per row tile, rounded up to a multiple of those in flight."""
    in_flight = STEPS[-(-problem.m // 8)]
    return -(-problem.k // (STEP_COLUMNS * WARPS * in_flight)) * in_flight


def _prepared(problem: Problem) -> FusedProduct:
    n, k, facts = problem.n, problem.k, device_facts(problem.device)
    defines = _defines(problem.dtype, -(-problem.m // 8), problem.fusion_defines)
    kernel = SOURCE.build("semisparse_dense_decode", defines, _shared_x(problem)).load(problem.device)
    ctas = min(-(-n // ROWS), CTAS_PER_SM * facts.sms)
    sizes = {"n": n, "k": k, "steps": _steps(problem)}
    width = n // 2 if problem.epilogue == "silu_mul" else n

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        x, w = aligned(x), aligned(packed.tensors["values"])
        bias = bias_as(bias, x.dtype)
        y = x.new_empty(x.shape[0], width)
        kernel(
            (ctas, 1, 1), 32 * WARPS, pdl=facts.has_pdl, x=x, w=w, bias=bias, norm_weight=fused.norm_weight,
            residual=fused.residual, y=y, m=x.shape[0], epsilon=fused.epsilon, **sizes,
        )  # fmt: skip
        return y

    return decode

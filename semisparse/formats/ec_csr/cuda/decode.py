"""`decode`: 1 to 16 tokens on FMA units, in passes of up to 8, from row panels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.schedule import SCALARS, DecodeSchedule, decode_schedule
from semisparse.formats.ec_csr.storage.deltas import LANES, has_lists, has_tiles, layout_of
from semisparse.formats.ec_csr.storage.gpu import span_limit_of
from semisparse.formats.ec_csr.storage.panels import SEGMENTS, is_paired, lists_of, vector_of
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import bias_as

MAX_TOKENS = 16

FEW_TOKENS = 2
"""Tokens up to which `pays` prefers this kernel to those on mask tiles."""

UNFUSED: Defines = {"RMS_NORM": 0, "ADD_RESIDUAL": 0, "SILU_MUL": 0}

SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    tuple(
        {**DecodeSchedule(*schedule).defines, **UNFUSED, **fusion}
        for schedule, fusion in (
            ((torch.float16, 4, 4096, 32, False, 1, 2), {}),
            ((torch.float32, 8, 4096, 64, True, 1, 2), {}),
            ((torch.bfloat16, 8, 4096, 64, True, 8, 2), {}),
            ((torch.float32, 8, 1 << 20, 64, False, 2, 2), {}),
            ((torch.float16, 4, 4096, 32, False, 4, 2), {}),
            ((torch.bfloat16, 4, 4096, 32, False, 1, 3), {}),
            ((torch.bfloat16, 4, 4096, 32, True, 2, 3), {}),
            ((torch.bfloat16, 4, 4096, 48, True, 1, 2), {"RMS_NORM": 1}),
            ((torch.bfloat16, 4, 4096, 56, True, 1, 3), {"RMS_NORM": 1, "SILU_MUL": 1}),
            ((torch.float16, 8, 4096, 64, True, 2, 2), {"RMS_NORM": 1, "SILU_MUL": 1}),
            ((torch.float16, 4, 11008, 32, False, 1, 2), {"ADD_RESIDUAL": 1}),
            ((torch.float32, 8, 4096, 64, True, 2, 2), {"RMS_NORM": 1, "SILU_MUL": 1}),
        )
    ),
)


def panels_refusal(problem: Problem) -> str | None:
    """Say why no kernel that reads row panels can compute ``problem`` on its GPU, or None if one may."""
    if not has_lists(problem.params):
        return f"reads row panels, this weight is stored in {layout_of(problem.params)}"
    if problem.dtype not in SCALARS or problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    reason = panels_refusal(problem)
    if reason is not None:
        return reason
    facts = device_facts(problem.device)
    needed = decode_schedule(problem, facts).shared_bytes(span_limit_of(problem.params))
    if needed > facts.shared_per_cta:
        return f"one token needs {needed} bytes of shared memory, the GPU has {facts.shared_per_cta}"
    return None


def pays(problem: Problem) -> bool:
    """Say whether no kernel on mask tiles, if the weight has them, is faster: at 1 and 2 tokens, H200.

    Microseconds at one token (of `decode_tiles`): 7.1 (8.8) at 4096 x 4096, 15.0 (18.7) at 11008 x 4096, 12.5 (17.9) at
    4096 x 11008, 57.9 (70.2) at 28672 x 8192.
    """
    return problem.m <= FEW_TOKENS or not has_tiles(problem.params)


def prepare(problem: Problem) -> Product:
    """Load the kernel; return the matmul for a bucket of M and for every weight of one shape and span limit.

    Args:
        problem: x float16, bfloat16 or float32, as w is.
    """
    return _prepared(problem)


def fuse(problem: Problem) -> FusedProduct | None:
    """As `prepare`, for a problem with a prologue or an epilogue.

    None if x cannot be loaded in units of 16 bytes, or with SiLU if the gate's rows are in other panels than up's.
    """
    unaligned = problem.k % vector_of(problem.dtype) != 0
    apart = problem.epilogue == "silu_mul" and (problem.n % 2 != 0 or not is_paired(problem.params))
    return None if unaligned or apart else _prepared(problem)


def _prepared(problem: Problem) -> FusedProduct:
    facts = device_facts(problem.device)
    schedule, n, k = decode_schedule(problem, facts), problem.n, problem.k
    shared = schedule.shared_bytes(span_limit_of(problem.params))
    build = SOURCE.build("semisparse_ec_csr_decode", {**schedule.defines, **problem.fusion_defines}, shared)
    kernel, panels = build.load(problem.device), -(-n // schedule.panel_rows)
    width = n // 2 if problem.epilogue == "silu_mul" else n

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        m = x.shape[0]
        x, y, bias = x.contiguous(), x.new_empty(m, width), bias_as(bias, x.dtype)
        x = x.clone() if problem.is_fused and x.data_ptr() % 16 else x
        kernel(
            (panels, -(-m // schedule.tokens), 1), LANES * SEGMENTS, pdl=facts.has_pdl,
            x=x, **lists_of(packed), bias=bias, norm_weight=fused.norm_weight, residual=fused.residual, y=y,
            m=m, n=n, k=k, span=int(packed.params["span"]), epsilon=fused.epsilon,
        )  # fmt: skip
        return y

    return decode

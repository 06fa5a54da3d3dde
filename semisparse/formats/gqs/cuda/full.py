"""The kernel `full`, for 1 to 64 tokens and weights in 8 to 2 bits of which no group is dropped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import quantise_x
from semisparse.formats.gqs.cuda.full_schedule import (
    K_TILE,
    FullSchedule,
    choose_full,
    choose_fused,
    shape_refusal,
)
from semisparse.formats.gqs.storage.disk import code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_ROWS
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.operands import aligned, bias_as

HALF, BFLOAT = torch.float16, torch.bfloat16

# The variants are the extremes of what is compiled.
SOURCE = CudaSource(
    Path(__file__).with_name("full.cu"),
    (
        # tile_m, warps_n, warps_k, row_tiles, stages, ctas_per_sm, codes, x_tokens, x_span, fusion
        FullSchedule(8, 8, 2, 2, 3, 1, True).defines(HALF, 4, 128),
        FullSchedule(8, 1, 8, 2, 3, 1, True, 8).defines(BFLOAT, 2, 64),
        FullSchedule(8, 4, 4, 2, 3, 1, True, 1).defines(HALF, 3, 128),
        FullSchedule(16, 8, 2, 2, 3, 1, True).defines(BFLOAT, 4, 128),
        FullSchedule(16, 8, 2, 2, 3, 1, False).defines(HALF, 4, 64),
        FullSchedule(32, 8, 2, 2, 2, 1, False).defines(BFLOAT, 8, 16),
        FullSchedule(64, 8, 1, 2, 2, 1, False).defines(BFLOAT, 8, 16),
        FullSchedule(64, 4, 2, 2, 2, 1, False).defines(HALF, 2, 32),
        FullSchedule(8, 2, 8, 2, 3, 1, True, 2, 1, (1, 0, 1)).defines(BFLOAT, 4, 128),
        FullSchedule(8, 2, 8, 1, 3, 1, False, 1, 1, (1, 1, 0)).defines(HALF, 8, 32),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Return why `prepare` cannot compute ``problem`` here, or None if it can."""
    return shape_refusal(problem) or cuda_refusal(problem.device)


def prepare(problem: Problem, schedule: FullSchedule | None = None) -> Product:
    """Return the matmul: choose its schedule, compile and load its kernel.

    Args:
        problem: x and w are both float16 or both bfloat16, and w drops no group.
        schedule: tile sizes, stages and warps; None for that of `choose_full`.
    Returns:
        A function that accumulates in float32.
    """
    facts, size = device_facts(problem.device), group_size(problem.pattern)
    bits = code_bits(problem.params, size)
    return _prepared(problem, schedule or choose_full(problem.m, problem.n, problem.k, bits, size, facts))


def fuse(problem: Problem) -> FusedProduct | None:
    """Return the matmul with its prologue and epilogue in one kernel; None if no schedule can fuse them."""
    schedule = choose_fused(problem, device_facts(problem.device))
    return None if schedule is None else _prepared(problem, schedule)


def _prepared(problem: Problem, schedule: FullSchedule) -> FusedProduct:
    n, k, device, dtype = problem.n, problem.k, problem.device, problem.dtype
    facts, size = device_facts(device), group_size(problem.pattern)
    bits = code_bits(problem.params, size)
    kernel = SOURCE.build(
        "semisparse_gqs_full", schedule.defines(dtype, bits, size), schedule.shared_bytes(k, bits, size)
    ).load(device)
    quantise = quantise_x.prepare(device, dtype) if quantises_x(problem.params) else None
    groups, row_tiles, row_ctas = -(-k // size), n // CHUNK_ROWS, schedule.row_ctas(n)
    k_tiles = -(-groups * size // K_TILE)
    row_tile_codes = CHUNK_ROWS * groups * size * bits // 8
    staged = (schedule.stages - 1) * schedule.warps_k * CHUNK_ROWS * K_TILE * bits // 8
    prefetch_bytes = min(row_tile_codes, staged) if facts.has_pdl else 0

    width = n // 2 if problem.epilogue == "silu_mul" else n

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        m = x.shape[0]
        x = aligned(x if quantise is None else quantise(x))
        y = x.new_empty(m, width)
        kernel(
            (row_ctas * -(-m // schedule.tile_m), 1, 1),
            schedule.threads,
            pdl=facts.has_pdl,
            x=x,
            **{name: aligned(packed.tensors[name]) for name in ("codes", "scale", "zero")},
            bias=bias_as(bias, dtype),
            norm_weight=fused.norm_weight,
            residual=fused.residual,
            y=y,
            m=m,
            n=n,
            k=k,
            groups=groups,
            row_tiles=row_tiles,
            k_tiles=k_tiles,
            row_ctas=row_ctas,
            prefetch_bytes=prefetch_bytes,
            epsilon=fused.epsilon,
        )
        return y

    return matmul

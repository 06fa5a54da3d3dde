"""The kernel `decode`, for 1 to 16 tokens: straight from the packed groups of 16 in 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import quantise_x
from semisparse.formats.gqs.cuda.schedule import ELEMENTS, GROUP_SIZE, MAX_TOKENS, Schedule, choose, choose_fused
from semisparse.formats.gqs.storage.disk import TENSORS, code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import NOTHING_FUSED, FusedOperands, FusedProduct, Problem, Product
from semisparse.quant.group import KINDS
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.operands import aligned, bias_as

BITS = (4, 8)
"""Bits per code that `decode.cu` supports."""

# The variants are the extremes of what is compiled.
SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        *(
            schedule.defines
            for schedule in (
                Schedule(torch.bfloat16, 4, 2, True, False, True, 16),
                Schedule(torch.float16, 4, 1, False, True, True, 16),
                Schedule(torch.float16, 4, 1, True, True, False, 8),
                Schedule(torch.float16, 4, 2, False, True, False, 8),
                Schedule(torch.float16, 4, 8, False, True, False, 8),
                Schedule(torch.bfloat16, 4, 16, False, False, False, 8),
                Schedule(torch.float16, 8, 16, False, True, False, 8),
                Schedule(torch.bfloat16, 8, 16, False, False, False, 8),
                Schedule(torch.bfloat16, 8, 8, False, True, False, 4),
                Schedule(torch.bfloat16, 4, 1, False, True, True, 16, (1, 0, 0)),
                Schedule(torch.float16, 4, 1, False, True, True, 16, (1, 0, 1)),
                Schedule(torch.bfloat16, 4, 2, False, False, True, 8, (1, 0, 1)),
                Schedule(torch.bfloat16, 4, 1, False, True, False, 8, (0, 1, 0)),
            )
        ),
        {**Schedule(torch.bfloat16, 4, 1, False, True, True, 16, (0, 0, 1)).defines, "EXPERTS": 1},
        {**Schedule(torch.bfloat16, 4, 2, False, True, True, 8, (0, 0, 1)).defines, "EXPERTS": 1},
        {**Schedule(torch.float16, 4, 8, False, False, True, 4, (0, 0, 1)).defines, "EXPERTS": 1},
        {**Schedule(torch.bfloat16, 4, 8, False, True, True, 8).defines, "EXPERTS": 1},
    ),
)


def weight_refusal(problem: Problem) -> str | None:
    """Return why the kernel does not support ``problem`` on any GPU, or None if it does."""
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in ELEMENTS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if group_size(problem.pattern) != GROUP_SIZE:
        return f"takes groups of {GROUP_SIZE}, this weight has groups of {group_size(problem.pattern)}"
    if KINDS[str(problem.params["kind"])] not in BITS:
        return f"takes codes of 4 or 8 bits, this weight is {problem.params['kind']}"
    return None


def refusal(problem: Problem) -> str | None:
    """Return why `prepare` cannot compute ``problem`` here, or None if it can."""
    return weight_refusal(problem) or cuda_refusal(problem.device)


def prepare(problem: Problem) -> Product:
    """Return the matmul of 1 to 16 tokens: choose its schedule, compile and load its kernels."""
    facts, int8_x = device_facts(problem.device), quantises_x(problem.params)
    bits = code_bits(problem.params, GROUP_SIZE)
    return _prepared(problem, choose(problem.m, problem.n, problem.k, problem.dtype, bits, int8_x, facts))


def fuse(problem: Problem) -> FusedProduct | None:
    """Return the matmul with its prologue and epilogue in one kernel; None if no schedule can fuse them."""
    schedule = choose_fused(problem, device_facts(problem.device))
    return None if schedule is None else _prepared(problem, schedule)


def _prepared(problem: Problem, schedule: Schedule) -> FusedProduct:
    n, k, device, dtype = problem.n, problem.k, problem.device, problem.dtype
    facts, gated = device_facts(device), problem.epilogue == "silu_mul"
    quantise = quantise_x.prepare(device, dtype) if quantises_x(problem.params) and not schedule.int8_x else None
    row_tiles, chunks_per_tile = -(-n // CHUNK_ROWS), -(-k // (CHUNK_GROUPS * GROUP_SIZE))
    tiles = row_tiles // 2 if gated else row_tiles  # a CTA has the same tiles of the gate and of the up projection
    ctas = schedule.ctas(tiles, facts)
    tiles_per_cta, ctas_with_extra = divmod(tiles, ctas)
    whole_at = schedule.shared_bytes(k)
    shared = whole_at + schedule.gated_bytes(n, facts)
    kernel = SOURCE.build("semisparse_gqs_decode", schedule.defines, shared).load(device)
    width = n // 2 if gated else n

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None, fused: FusedOperands = NOTHING_FUSED) -> Tensor:
        m, kept = x.shape[0], int(packed.params["kept"])
        if not (kept or problem.is_fused):
            return x.new_zeros(m, n) if bias is None else bias.to(dtype).repeat(m, 1)
        x = x if quantise is None else quantise(x)
        x = aligned(x) if schedule.aligned_k else x.contiguous()
        y = x.new_empty(m, width)
        kernel(
            (ctas, 1, 1),
            schedule.threads,
            pdl=facts.has_pdl,
            x=x,
            **{name: aligned(packed.tensors[name]) for name in TENSORS},
            bias=bias_as(bias, dtype),
            norm_weight=fused.norm_weight,
            residual=fused.residual,
            y=y,
            m=m,
            n=n,
            k=k,
            chunks_per_tile=chunks_per_tile,
            chunks=row_tiles * chunks_per_tile,
            kept=kept,
            tiles_per_cta=tiles_per_cta,
            ctas_with_extra=ctas_with_extra,
            prefetch_groups=schedule.prefetched_groups(kept, ctas) if facts.has_pdl else 0,
            whole_at=whole_at,
            epsilon=fused.epsilon,
        )
        return y

    return matmul

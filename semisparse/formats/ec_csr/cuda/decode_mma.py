"""`decode_mma`: up to 16 tokens of 16 bits on tensor cores, in one pass over row panels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.decode import panels_refusal
from semisparse.formats.ec_csr.cuda.schedule import (
    DECODE_TOKENS,
    MMA_TOKENS,
    MMA_WARPS,
    MmaSchedule,
    decode_schedule,
    mma_schedule,
)
from semisparse.formats.ec_csr.storage.deltas import LANES, has_tiles
from semisparse.formats.ec_csr.storage.panels import lists_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.operands import bias_as

REDUCE_THREADS = 256

SOURCE = CudaSource(
    Path(__file__).with_name("decode_mma.cu"),
    tuple(
        MmaSchedule(*schedule).defines
        for schedule in (
            (torch.float16, 4, 4096, 32, False, 16, 8, 2),
            (torch.bfloat16, 8, 4096, 56, True, 8, 4, 1),
            (torch.float16, 8, 1 << 20, 64, False, 16, 2, 1),
        )
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MMA_TOKENS[-1]:
        return f"takes 1 to {MMA_TOKENS[-1]} tokens, got {problem.m}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {problem.dtype}; it takes float16 and bfloat16"
    reason = panels_refusal(problem)
    if reason is not None:
        return reason
    facts = device_facts(problem.device)
    needed = mma_schedule(problem, facts).shared_bytes
    if needed > facts.shared_per_cta:
        return f"a tile needs {needed} bytes of shared memory, the GPU has {facts.shared_per_cta}"
    return None


def pays(problem: Problem) -> bool:
    """Say whether the kernel was measured to be faster than `decode` (results/h200/kernels-float16.csv).

    Microseconds of this kernel (`decode`) at 16 tokens: 20.5 (31.4) at 4096 x 4096 and 55.8 (83.6) at 11008 x 4096,
    with 8 lanes per CTA; 70.6 (81.9) at 4096 x 11008, where `decode` takes four passes; 301 (287) at 28672 x 8192, with
    4 lanes per CTA, where `decode` takes two. At 8 tokens: 16.0 (16.1), 42.8 (42.6), 48.8 (41.9) and 259 (150).
    """
    if problem.m <= max(DECODE_TOKENS) or has_tiles(problem.params):
        return False
    facts = device_facts(problem.device)
    passes = -(-problem.m // decode_schedule(problem, facts).tokens)
    return passes > 2 or mma_schedule(problem, facts).lanes == 8


def prepare(problem: Problem) -> Product:
    """Load the kernels; return the matmul for a bucket of M: x float16 or bfloat16, as w is."""
    facts, n, k = device_facts(problem.device), problem.n, problem.k
    schedule = mma_schedule(problem, facts)
    build = SOURCE.build("semisparse_ec_csr_decode_mma", schedule.defines, schedule.shared_bytes)
    kernel = build.load(problem.device)
    reduce = SOURCE.build("semisparse_ec_csr_decode_mma_reduce", schedule.defines).load(problem.device)
    grid = (-(-n // schedule.panel_rows) * schedule.splits, 1, 1)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        x, y, bias = x.contiguous(), x.new_empty(m, n), bias_as(bias, x.dtype)
        parts = torch.empty(schedule.splits, m, n, dtype=torch.float32, device=x.device)
        sizes = {"m": m, "n": n, "k": k, "stride": schedule.stride}
        kernel(grid, LANES * MMA_WARPS, pdl=facts.has_pdl, x=x, **lists_of(packed), parts=parts, **sizes)
        per_output = (-(-n // REDUCE_THREADS), m, 1)
        reduce(per_output, REDUCE_THREADS, pdl=facts.has_pdl, parts=parts, bias=bias, y=y, m=m, n=n)
        return y

    return decode

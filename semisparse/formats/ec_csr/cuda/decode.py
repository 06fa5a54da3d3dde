"""`decode`: 1 to 16 tokens on FMA units, in passes of up to 8, from row panels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.schedule import SCALARS, DecodeSchedule, decode_schedule
from semisparse.formats.ec_csr.storage.deltas import LANES, PANELS, layout_of
from semisparse.formats.ec_csr.storage.gpu import span_limit_of
from semisparse.formats.ec_csr.storage.panels import SEGMENTS
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal

MAX_TOKENS = 16

SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    tuple(
        DecodeSchedule(*schedule).defines
        for schedule in (
            (torch.float16, 4, 4096, 32, 1, 2),
            (torch.float32, 8, 4096, 64, 1, 2),
            (torch.bfloat16, 8, 4096, 64, 8, 2),
            (torch.float32, 8, 1 << 20, 64, 2, 2),
            (torch.float16, 4, 4096, 32, 4, 2),
            (torch.bfloat16, 4, 4096, 32, 1, 3),
            (torch.bfloat16, 4, 4096, 32, 2, 3),
        )
    ),
)


def panels_refusal(problem: Problem) -> str | None:
    """Say why no kernel that reads row panels can compute ``problem`` on its GPU, or None if one may."""
    if layout_of(problem.params) != PANELS:
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


def prepare(problem: Problem) -> Product:
    """Load the kernel; return the matmul for a bucket of M and for every weight of one shape and span limit.

    Args:
        problem: x float16, bfloat16 or float32, as w is.
    """
    facts = device_facts(problem.device)
    schedule, n, k = decode_schedule(problem, facts), problem.n, problem.k
    shared = schedule.shared_bytes(span_limit_of(problem.params))
    build = SOURCE.build("semisparse_ec_csr_decode", schedule.defines, shared)
    kernel, panels = build.load(problem.device), -(-n // schedule.panel_rows)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m = x.shape[0]
        x, y, bias = x.contiguous(), x.new_empty(m, n), None if bias is None else bias.to(x.dtype).contiguous()
        grid = (panels, -(-m // schedule.tokens), 1)
        sizes = {"m": m, "n": n, "k": k, "span": int(packed.params["span"])}
        kernel(grid, LANES * SEGMENTS, pdl=facts.has_pdl, x=x, **packed.tensors, bias=bias, y=y, **sizes)
        return y

    return decode

"""`paper`: 1 to 16 tokens from EC-CSR, by the paper's kernel (section 7)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.checks import choice_of
from semisparse.formats.ec_csr.cuda.schedule import BITS, SCALARS
from semisparse.formats.ec_csr.paper.disk import GRANULARITIES
from semisparse.formats.ec_csr.storage.deltas import LANES, PAPER, delta_bits_of, index_bits_for, layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines

MAX_TOKENS = 16

TOKENS = (1, 2, 4, 8)
"""Tokens per pass."""

ACCUMULATORS = 16
"""Of a lane, rows times tokens: more do not fit its registers."""

WARPS = 4

REDUCE_THREADS = 256


def _defines(dtype: torch.dtype, tokens: int, delta_bits: int, granularity: int, k: int) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "TOKENS": tokens,
        "DELTA_BITS": delta_bits,
        "INDEX": BITS[index_bits_for(k) // 8],
        "COARSEST": granularity,
        "WARPS": WARPS,
    }


SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        _defines(torch.float16, 1, 4, 1, 4096),
        _defines(torch.float32, 1, 8, 1, 4096),
        _defines(torch.bfloat16, 8, 8, 2, 4096),
        _defines(torch.float32, 2, 8, 8, 1 << 20),
        _defines(torch.float16, 4, 4, 4, 4096),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != PAPER:
        return f"reads the layout paper, this weight is stored in {layout_of(problem.params)}"
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in SCALARS or problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def prepare(problem: Problem) -> Product:
    """Load the kernels for a bucket of M: x float16, bfloat16 or float32, as w is."""
    n, k, device = problem.n, problem.k, problem.device
    granularity = choice_of("ec_csr", problem.params, "granularity", GRANULARITIES)
    fitting = [tokens for tokens in TOKENS if tokens * granularity <= ACCUMULATORS]
    tokens = next((tokens for tokens in fitting if tokens >= problem.m), fitting[-1])
    defines = _defines(problem.dtype, tokens, delta_bits_of(problem.params), granularity, k)
    kernel = SOURCE.build("semisparse_ec_csr_paper_decode", defines).load(device)
    reduce = SOURCE.build("semisparse_ec_csr_paper_reduce", defines).load(device)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m, stored = x.shape[0], dict(packed.tensors)
        row_slots, y, passes = stored.pop("row_slots"), x.new_empty(m, n), -(-m // tokens)
        bundles, slots = len(stored["bundles"]), len(stored["slots"])
        partial = torch.empty(passes, slots, tokens, dtype=torch.float32, device=x.device)
        if bundles:
            grid = (-(-bundles // WARPS), passes, 1)
            inputs: dict[str, Tensor | int] = {"x": x.contiguous(), **stored, "count": bundles, "slot_count": slots}
            kernel(grid, LANES * WARPS, pdl=False, **inputs, partial=partial, m=m, k=k)
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        grid = (-(-n // REDUCE_THREADS), m, 1)
        reduce(grid, REDUCE_THREADS, partial=partial, row_slots=row_slots, bias=bias, y=y, m=m, n=n, slot_count=slots)
        return y

    return decode

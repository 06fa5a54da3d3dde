"""Kernel `paper`: GEMV and skinny GEMM (M <= 16) for weights in the layout `paper`, the paper's EC-CSR (section 7)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, choice_of
from semisparse.formats.ec_csr.cuda.schedule import SCALARS, UNSIGNED_TYPES
from semisparse.formats.ec_csr.paper.disk import GRANULARITIES
from semisparse.formats.ec_csr.storage.deltas import LANES, PAPER, delta_bits_of, index_bits_for, layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import bias_as

MAX_TOKENS = 16
"""Maximum M."""

TOKENS = (1, 2, 4, 8)
"""Tokens per pass over the weight that decode.cu can be compiled for; more tokens take several passes."""

ACCUMULATORS = 16
"""Maximum accumulators per lane, rows x tokens: more do not fit its registers."""

WARPS = 4
"""Warps per CTA of semisparse_ec_csr_paper_decode."""

REDUCE_THREADS = 256
"""Threads per CTA of semisparse_ec_csr_paper_reduce."""


def _defines(dtype: torch.dtype, tokens: int, delta_bits: int, granularity: int, k: int) -> Defines:
    """Return the macros of decode.cu; ``granularity`` is that of the weight's coarsest blocks, in rows."""
    return {
        "SCALAR": SCALARS[dtype],
        "TOKENS": tokens,
        "DELTA_BITS": delta_bits,
        "INDEX": UNSIGNED_TYPES[index_bits_for(k) // 8],
        "COARSEST": granularity,
        "WARPS": WARPS,
    }


SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        _defines(torch.float16, tokens=1, delta_bits=4, granularity=1, k=4096),
        _defines(torch.float32, tokens=1, delta_bits=8, granularity=1, k=4096),
        _defines(torch.bfloat16, tokens=8, delta_bits=8, granularity=2, k=4096),
        _defines(torch.float32, tokens=2, delta_bits=8, granularity=8, k=1 << 20),
        _defines(torch.float16, tokens=4, delta_bits=4, granularity=4, k=4096),
    ),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here; None if it can."""
    if layout_of(problem.params) != PAPER:
        return f"needs the layout {PAPER}, the weight is in the layout {layout_of(problem.params)}"
    if problem.m > MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in SCALARS or problem.dtype != problem.weight_dtype:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in SCALARS)
        return f"x and w must have the same dtype of {dtypes}, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def prepare(problem: Problem) -> Product:
    """Return the matmul for ``problem``: x [M, K], w and y [M, N] in one dtype: float16, bfloat16 or float32.

    It computes any M; that of ``problem`` only selects the tokens per pass.

    Raises:
        KernelError: decode.cu does not compile.
    """
    n, k, device = problem.n, problem.k, problem.device
    granularity = choice_of("ec_csr", problem.params, "granularity", GRANULARITIES)
    supported = [number for number in TOKENS if number * granularity <= ACCUMULATORS]
    tokens = next((number for number in supported if number >= problem.m), supported[-1])
    defines = _defines(problem.dtype, tokens, delta_bits_of(problem.params), granularity, k)
    kernel = SOURCE.build("semisparse_ec_csr_paper_decode", defines).load(device)
    reduce = SOURCE.build("semisparse_ec_csr_paper_reduce", defines).load(device)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m, stored = x.shape[0], dict(packed.tensors)
        row_slots, y, passes = stored.pop("row_slots"), x.new_empty(m, n), -(-m // tokens)
        # A bundle is the block of rows that a warp reads. Each of its rows writes a partial sum per token, to its slot.
        bundles, slots = len(stored["bundles"]), len(stored["slots"])
        partial = torch.empty(passes, slots, tokens, dtype=torch.float32, device=x.device)
        if bundles:
            grid = (-(-bundles // WARPS), passes, 1)
            operands: dict[str, Tensor | int] = {"x": x.contiguous(), **stored, "partial": partial}
            operands |= {"bundle_count": bundles, "slot_count": slots, "m": m, "k": k}
            kernel(grid, LANES * WARPS, pdl=False, **operands)
        bias = bias_as(bias, x.dtype)
        grid = (-(-n // REDUCE_THREADS), m, 1)
        reduce(grid, REDUCE_THREADS, partial=partial, row_slots=row_slots, bias=bias, y=y, m=m, n=n, slot_count=slots)
        return y

    return matmul

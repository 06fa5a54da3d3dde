"""The GPU kernel of the layout ``rows``: up to 4 tokens, a group a lane, by Stream-K."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Problem
from semisparse.formats.gqs import cuda
from semisparse.quant.group import KINDS
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

TOKENS = (1, 2, 4)
"""Tokens that a build has registers for; the smallest that is enough is taken."""

WARPS = 8
"""Of a block."""

BATCH = 4
"""Steps that a warp loads at once, while it multiplies as many."""

BLOCKS_PER_PROCESSOR = 2
"""That registers are left for, and that share the work."""


def _defines(dtype: torch.dtype, bits: int, tokens: int) -> Defines:
    return {
        "SCALAR": cuda.SCALARS[dtype],
        "BITS": bits,
        "TOKENS": tokens,
        "WARPS": WARPS,
        "BATCH": BATCH,
        "BLOCKS": BLOCKS_PER_PROCESSOR,
    }


ROWS = CudaSource(
    Path(__file__).with_name("rows.cu"),
    (
        _defines(torch.float16, 4, 1),
        _defines(torch.bfloat16, 4, 4),
        _defines(torch.float16, 8, 2),
        _defines(torch.bfloat16, 8, 4),
    ),
)

SOURCES = (ROWS,)

RESERVED_SHARED = 1024
"""Bytes of a processor's shared memory that a block cannot have."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def refusal(problem: Problem) -> str | None:
    """Say why `decode` cannot compute ``problem`` here, or None if it can."""
    if problem.m > TOKENS[-1]:
        return f"takes 1 to {TOKENS[-1]} tokens, got {problem.m}"
    reason = cuda.decode_refusal(problem)
    if reason:
        return reason
    wanted = _shared_bytes(problem.m, problem.k)
    found = torch.cuda.get_device_properties(problem.device).shared_memory_per_multiprocessor - RESERVED_SHARED
    return None if wanted <= found else f"keeps x in {wanted} bytes of shared memory, this GPU has {found}"


def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 4 tokens.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype, in the layout ``rows``.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    (m, k), n = x.shape, packed.shape[0]
    kept, steps = (int(packed.params[name]) for name in ("kept", "steps"))
    if not kept:
        return x.new_zeros(m, n) if bias is None else bias.to(x.dtype).repeat(m, 1)
    tokens = next(tokens for tokens in TOKENS if tokens >= m)
    blocks = min(BLOCKS_PER_PROCESSOR * device_facts(x.device).processors, steps)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    parts = torch.empty((blocks, 2, tokens), dtype=torch.float32, device=x.device)
    stored = [packed.tensors[name] for name in ("steps", "begins", "codes", "heads", "zero")]
    operands = [x, *stored, None if bias is None else bias.to(x.dtype), y, parts, cuda.arrivals(x.device, n)]
    operands = [None if operand is None else operand.contiguous() for operand in operands]
    pointers = [None if operand is None else operand.data_ptr() for operand in operands]
    vectors = k % 8 == 0 and x.data_ptr() % 16 == 0
    kernel = _kernel(x.device, x.dtype, KINDS[str(packed.params["kind"])], tokens, _shared_bytes(m, k))
    kernel(x.device, (blocks, 1, 1), 32 * WARPS, *pointers, m, n, k, kept, *divmod(steps, blocks), int(vectors))
    return y


def _shared_bytes(m: int, k: int) -> int:
    """Give the shared memory of a block: two shares of each warp, with room for all tokens, and x."""
    return WARPS * 2 * 4 * TOKENS[-1] + m * 32 * -(-k // cuda.SIZE)


@cache
def _kernel(device: torch.device, dtype: torch.dtype, bits: int, tokens: int, shared: int) -> CudaKernel:
    cubin = compile_cubin(ROWS.path, device_facts(device).arch, _defines(dtype, bits, tokens))
    return CudaKernel(cubin, "semisparse_gqs_rows", (*[_POINTER] * 10, *[_INT] * 7), shared)

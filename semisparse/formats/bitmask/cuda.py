"""GPU kernels: decode straight from the packed bytes for few tokens, unpack and cuBLAS for many."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.pack import BLOCK, unpack, values_per_block
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, compile_cubin, unavailable

MAX_DECODE_TOKENS = 16

ROWS_PER_BLOCK = 8
"""A warp a row."""

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

TOKENS = (1, 2, 4, 8, 16)
"""Tokens that a build has registers for; the smallest that is enough is taken."""

DECODE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    tuple({"SCALAR": scalar, "TOKENS": tokens} for scalar in SCALARS.values() for tokens in TOKENS),
)

SOURCES = (DECODE,)

_POINTER = ctypes.c_void_p
_PARAMETERS = (*[_POINTER] * 6, *[ctypes.c_int] * 5)


def decode_refusal(problem: Problem) -> str | None:
    """Say why `decode` cannot compute ``problem`` here, or None if it can."""
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in SCALARS or problem.weight_dtype != problem.dtype:
        return f"x and w are both float16 or both bfloat16, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def prepare_decode(problem: Problem) -> Product:
    """Prepare to multiply 1 to 16 tokens, float16 or bfloat16 as w is, in the layout ``rows``."""
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    kernel = _decode_kernel(device, problem.dtype, next(tokens for tokens in TOKENS if tokens >= m))
    grid, sizes = (-(-n // ROWS_PER_BLOCK), 1, 1), (m, n, k, -(-k // BLOCK), values_per_block(problem.pattern) or 0)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        y = x.new_empty(m, n)
        stored = [packed.tensors.get(name) for name in ("masks", "values", "row_starts")]
        bias = None if bias is None else bias.to(x.dtype)
        operands = [None if operand is None else operand.contiguous() for operand in (x, *stored, bias)]
        kernel(device, grid, 32 * ROWS_PER_BLOCK, *map(address, operands), y.data_ptr(), *sizes)
        return y

    return decode


@cache
def _decode_kernel(device: torch.device, dtype: torch.dtype, tokens: int) -> CudaKernel:
    cubin = compile_cubin(DECODE.path, device_facts(device).arch, {"SCALAR": SCALARS[dtype], "TOKENS": tokens})
    return CudaKernel(cubin, "semisparse_bitmask_decode", _PARAMETERS)


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight and let cuBLAS multiply: for many tokens, and for float32."""
    return multiply_dense(x, unpack(packed), bias)

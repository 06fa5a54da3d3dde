"""GPU products: few tokens straight from the packed bytes, any number by unpacking; tiled.py has those between."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.pack import unpack
from semisparse.formats.vector_nm.tiled import SCALARS, aligned, machine_refusal
from semisparse.patterns import VectorNM
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

MAX_DECODE_TOKENS = 16
DECODE_LENGTHS = (8, 16, 32, 64, 128)
"""Rows of a vector: a lane takes eight."""

TOKENS = (1, 2, 4, 8)
"""Tokens that a decode build takes; more are several passes over the weight."""

PANEL_BYTES = 96 << 10
"""Of x in shared memory while decoding."""

UNPACK_THREADS = 256
UNPACK_ROWS, UNPACK_COLUMNS = 32, 128
"""Of a tile in unpack.cu; a wider window makes it wider."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def _decode_defines(pattern: VectorNM, dtype: torch.dtype, tokens: int, groups: int, processors: int) -> Defines:
    """Give the build of fewest microseconds at 4096 x 4096, 11008 x 4096 and 28672 x 8192 (H200, 16:32v32).

    For 1 token, with 16 warps 8.0, 16.2, 68.9, with 8 warps 8.8, 14.1, 66.3; with 4 slots ahead 8.1, 14.8, 68.4.
    """
    few = tokens < TOKENS[-1] and groups <= processors
    return {
        "SCALAR": SCALARS[dtype],
        "KEEP": pattern.keep,
        "WINDOW": pattern.window,
        "LENGTH": pattern.length,
        "TOKENS": tokens,
        "WARPS": 16 if few else 8,
        "AHEAD": 4 if tokens == TOKENS[-1] else 2,
    }


def _unpack_defines(pattern: VectorNM, itemsize: int) -> Defines:
    return {"BYTES": itemsize, "KEEP": pattern.keep, "WINDOW": pattern.window, "LENGTH": pattern.length}


DECODE_SOURCE = CudaSource(
    Path(__file__).with_name("decode.cu"),
    (
        *(_decode_defines(VectorNM(16, 32, 32), torch.float16, tokens, 128, 132) for tokens in TOKENS),
        _decode_defines(VectorNM(5, 7, 128), torch.bfloat16, 1, 512, 132),
        _decode_defines(VectorNM(4, 32, 8), torch.bfloat16, 8, 512, 132),
    ),
    spills_allowed="for 2 tokens the compiler keeps 16 warps at 64 registers on sm_80 and sm_89, 8 bytes too few",
)

UNPACK_SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    tuple(_unpack_defines(VectorNM(*p), size) for p in ((16, 32, 32), (5, 7, 1), (64, 256, 128)) for size in (2, 4)),
)

SOURCES = (DECODE_SOURCE, UNPACK_SOURCE)


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem``, or None if it can."""
    return machine_refusal(problem)


def unpack_torch_refusal(problem: Problem) -> str | None:
    """Say why `unpack_by_torch` cannot compute ``problem``, or None if it can."""
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def decode_refusal(problem: Problem) -> str | None:
    """Say why `decode` cannot compute ``problem`` here, or None if it can."""
    pattern = vectors_of(problem.pattern)
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, got {problem.dtype}"
    if pattern.length not in DECODE_LENGTHS:
        return f"takes vectors of {', '.join(map(str, DECODE_LENGTHS))} rows, not {pattern.length}"
    return machine_refusal(problem)


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight and let cuBLAS multiply: any length of vectors, any number of tokens."""
    return multiply_dense(x, unpack_on_gpu(packed), bias)


def unpack_by_torch(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Do the same on cards, and in environments, for which nothing can be compiled."""
    return multiply_dense(x, unpack(packed), bias)


def unpack_on_gpu(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    (n, k), pattern = packed.shape, vectors_of(packed.pattern)
    values, positions = packed.tensors["values"].contiguous(), packed.tensors["positions"].contiguous()
    groups, total, length = values.shape
    weight = values.new_empty(n, k)
    slice_rows = min(length, UNPACK_ROWS)
    tiles = -(-groups // (UNPACK_ROWS // slice_rows)) * -(-length // slice_rows)
    grid = (-(-k // _unpack_columns(pattern)), tiles, 1)
    kernel = _unpack_kernel(values.device, pattern, values.element_size())
    pointers = (values.data_ptr(), positions.data_ptr(), weight.data_ptr())
    kernel(values.device, grid, UNPACK_THREADS, *pointers, n, k, groups, total)
    return weight


def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply 1 to 16 tokens straight from the packed bytes.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype, accumulated in float32.
    """
    x = aligned(x)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    (m, k), n, pattern = x.shape, packed.shape[0], vectors_of(packed.pattern)
    values, positions = aligned(packed.tensors["values"]), packed.tensors["positions"].contiguous()
    groups, total, _ = values.shape
    tokens = next((count for count in TOKENS if count >= m), TOKENS[-1])
    windows = min(total // pattern.keep, max(1, PANEL_BYTES // (pattern.window * tokens * x.dtype.itemsize)))
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    defines = _decode_defines(pattern, x.dtype, tokens, groups, device_facts(x.device).processors)
    kernel = _decode_kernel(x.device, tuple(defines.items()), windows * pattern.window * tokens * x.dtype.itemsize)
    pointers = map(address, (x, values, positions, bias, y))
    grid = (groups, -(-m // tokens), 1)
    kernel(x.device, grid, 32 * int(defines["WARPS"]), *pointers, m, n, k, total, windows)
    return y


def _unpack_columns(pattern: VectorNM) -> int:
    return max(1, UNPACK_COLUMNS // pattern.window) * pattern.window


@cache
def _unpack_kernel(device: torch.device, pattern: VectorNM, itemsize: int) -> CudaKernel:
    cubin = compile_cubin(UNPACK_SOURCE.path, device_facts(device).arch, _unpack_defines(pattern, itemsize))
    words = -(-_unpack_columns(pattern) * itemsize // 4) | 1
    shared = 4 * words * UNPACK_ROWS
    return CudaKernel(cubin, "semisparse_vector_nm_unpack", (*[_POINTER] * 3, *[_INT] * 4), shared)


@lru_cache(maxsize=256)
def _decode_kernel(device: torch.device, defines: tuple[tuple[str, str | int], ...], panel_bytes: int) -> CudaKernel:
    cubin = compile_cubin(DECODE_SOURCE.path, device_facts(device).arch, dict(defines))
    macros = dict(defines)
    shared = max(panel_bytes, 4 * int(macros["WARPS"]) * int(macros["LENGTH"]))
    return CudaKernel(cubin, "semisparse_vector_nm_decode", (*[_POINTER] * 5, *[_INT] * 5), shared)

"""GPU products: few tokens straight from the packed bytes, any number by unpacking; tiled.py has those between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.pack import unpack
from semisparse.formats.vector_nm.tiled import SCALARS, aligned, machine_refusal, stored_slots
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
    """Say why `prepare_unpack_and_multiply` cannot compute ``problem``, or None if it can."""
    return machine_refusal(problem)


def unpack_torch_refusal(problem: Problem) -> str | None:
    """Say why `unpack_by_torch` cannot compute ``problem``, or None if it can."""
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def decode_refusal(problem: Problem, lengths: tuple[int, ...] = DECODE_LENGTHS) -> str | None:
    """Say why a kernel for few tokens and such vectors cannot compute ``problem`` here, or None if it can."""
    length = vectors_of(problem.pattern).length
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, got {problem.dtype}"
    if length not in lengths:
        return f"takes vectors of {', '.join(map(str, lengths))} rows, not {length}"
    return machine_refusal(problem)


def prepare_unpack_and_multiply(problem: Problem) -> Product:
    """Prepare to unpack the whole weight and let cuBLAS multiply: any length of vectors, any number of tokens."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def unpack_by_torch(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Do the same on cards, and in environments, for which nothing can be compiled."""
    return multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Prepare to give the weight back, [N, K] in its dtype."""
    n, k, dtype, device = problem.n, problem.k, problem.weight_dtype, problem.device
    pattern, (groups, total) = vectors_of(problem.pattern), stored_slots(problem)
    slice_rows = min(pattern.length, UNPACK_ROWS)
    tiles = -(-groups // (UNPACK_ROWS // slice_rows)) * -(-pattern.length // slice_rows)
    grid = (-(-k // _unpack_columns(pattern)), tiles, 1)
    kernel = _unpack_kernel(device, pattern, dtype.itemsize)

    def unpack_on_gpu(packed: Packed) -> Tensor:
        values, positions = packed.tensors["values"].contiguous(), packed.tensors["positions"].contiguous()
        weight = values.new_empty(n, k)
        kernel(device, grid, UNPACK_THREADS, *map(address, (values, positions, weight)), n, k, groups, total)
        return weight

    return unpack_on_gpu


def prepare_decode(problem: Problem, early: bool = False) -> Product:
    """Prepare to multiply 1 to 16 tokens straight from the packed bytes.

    Args:
        problem: x and w float16, or both bfloat16; sums are float32.
        early: whether the launch may begin before the kernel before it on the stream has ended (Hopper and later). It
            waits before it reads x and before it writes, but not before it reads the weight: nothing that still runs
            may be writing it.
    """
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    pattern, (groups, total), facts = vectors_of(problem.pattern), stored_slots(problem), device_facts(device)
    tokens = next((count for count in TOKENS if count >= m), TOKENS[-1])
    column_bytes = tokens * problem.dtype.itemsize
    windows = min(total // pattern.keep, max(1, PANEL_BYTES // (pattern.window * column_bytes)))
    defines = _decode_defines(pattern, problem.dtype, tokens, groups, facts.processors)
    kernel = _decode_kernel(device, tuple(defines.items()), windows * pattern.window * column_bytes)
    grid, threads = (groups, -(-m // tokens), 1), 32 * int(defines["WARPS"])
    return prepare_launch(problem, kernel, grid, threads, (m, n, k, total, windows, int(early)))


def prepare_launch(
    problem: Problem, kernel: CudaKernel, grid: tuple[int, int, int], threads: int, sizes: tuple[int, ...]
) -> Product:
    """Give the product of a kernel that takes x, the values, the positions, a bias and y, and then sizes."""
    m, n, device, dependent = problem.m, problem.n, problem.device, device_facts(problem.device).overlaps_launches

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, values = aligned(x), aligned(packed.tensors["values"])
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        y = x.new_empty(m, n)
        pointers = map(address, (x, values, packed.tensors["positions"].contiguous(), bias, y))
        kernel(device, grid, threads, *pointers, *sizes, dependent=dependent)
        return y

    return decode


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
    return CudaKernel(cubin, "semisparse_vector_nm_decode", (*[_POINTER] * 5, *[_INT] * 6), shared)

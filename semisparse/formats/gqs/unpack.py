"""The GPU kernel for many tokens: the weight unpacked at the speed of memory, multiplied by cuBLAS."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.activations import SCALARS, rounded, rounds_activations
from semisparse.formats.gqs.pack import bits_of, size_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

WARPS = 8

RUN = 8
"""Values whose codes a lane unpacks; rows of the dense weight begin at multiples of it."""


def _defines(dtype: torch.dtype, bits: int, size: int) -> Defines:
    return {"SCALAR": SCALARS[dtype], "BITS": bits, "SIZE": size, "WARPS": WARPS}


# The extremes of what is compiled.
UNPACK = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    (
        _defines(torch.float16, 4, 16),
        _defines(torch.bfloat16, 2, 4),
        _defines(torch.bfloat16, 3, 128),
        _defines(torch.float32, 8, 128),
    ),
)

SOURCES = (UNPACK,)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `prepare_unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.weight_dtype != problem.dtype or problem.dtype not in SCALARS:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def prepare_unpack_and_multiply(problem: Problem) -> Product:
    """Prepare to unpack the whole weight, of any kind and size of groups, and let cuBLAS multiply."""
    unpack, rounds = prepare_unpack(problem), rounds_activations(problem.params)
    return lambda x, packed, bias: multiply_dense(rounded(x, x.dtype) if rounds else x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Prepare to give the weight back, [N, K], as `pack.unpack` does; its rows begin at multiples of 8 values."""
    n, k, device, dtype = problem.n, problem.k, problem.device, problem.weight_dtype
    pitch, size = -(-k // RUN) * RUN, size_of(problem.pattern)
    kernel = _unpack_kernel(device, dtype, bits_of(problem.params, size), size)

    def unpack(packed: Packed) -> Tensor:
        stored = [packed.tensors[name].contiguous() for name in ("masks", "starts", "codes", "scale", "zero")]
        weight = stored[0].new_empty(n, pitch, dtype=dtype)
        row_tiles, column_tiles = stored[0].shape
        chunks = row_tiles * column_tiles
        pointers = [*map(address, stored), weight.data_ptr()]
        kernel(device, (-(-chunks // WARPS), 1, 1), 32 * WARPS, *pointers, n, pitch, chunks, column_tiles)
        return weight if pitch == k else weight[:, :k]

    return unpack


@cache
def _unpack_kernel(device: torch.device, dtype: torch.dtype, bits: int, size: int) -> CudaKernel:
    cubin = compile_cubin(UNPACK.path, device_facts(device).arch, _defines(dtype, bits, size))
    return CudaKernel(cubin, "semisparse_gqs_unpack", (*[_POINTER] * 6, *[_INT] * 4))

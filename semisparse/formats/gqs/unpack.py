"""The GPU kernel for many tokens: the weight unpacked at the speed of memory, multiplied by cuBLAS."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Problem
from semisparse.formats.gqs.activations import rounded, rounds_activations
from semisparse.formats.gqs.pack import bits_of, size_of
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

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
    """Say why `unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.weight_dtype != problem.dtype or problem.dtype not in SCALARS:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    if rounds_activations(problem.params) and importlib.util.find_spec("triton") is None:
        return "triton, which rounds the activations, is not installed: pip install 'semisparse[cuda]'"
    return unavailable()


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight into scratch memory and let cuBLAS multiply.

    Args:
        x: [M, K], in the weight's dtype.
        packed: of any kind and size of groups.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    if rounds_activations(packed.params):
        x = rounded(x, x.dtype)
    return multiply_dense(x, unpack(packed), bias)


def unpack(packed: Packed) -> Tensor:
    """Give the weight back on its GPU, [N, K], as `pack.unpack` does; its rows begin at multiples of 8 values."""
    n, k = packed.shape
    pitch = -(-k // RUN) * RUN
    masks = packed.tensors["masks"]
    weight = torch.empty((n, pitch), dtype=packed.dtype, device=masks.device)
    row_tiles, column_tiles = masks.shape
    chunks, size = row_tiles * column_tiles, size_of(packed.pattern)
    stored = [packed.tensors[name].contiguous() for name in ("masks", "starts", "codes", "scale", "zero")]
    pointers = [tensor.data_ptr() for tensor in (*stored, weight)]
    kernel = _unpack_kernel(masks.device, packed.dtype, bits_of(packed.params, size), size)
    kernel(masks.device, (-(-chunks // WARPS), 1, 1), 32 * WARPS, *pointers, n, pitch, chunks, column_tiles)
    return weight[:, :k]


@cache
def _unpack_kernel(device: torch.device, dtype: torch.dtype, bits: int, size: int) -> CudaKernel:
    cubin = compile_cubin(UNPACK.path, device_facts(device).arch, _defines(dtype, bits, size))
    return CudaKernel(cubin, "semisparse_gqs_unpack", (*[_POINTER] * 6, *[_INT] * 4))

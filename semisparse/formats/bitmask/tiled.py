"""GPU kernels for the layout ``tiles``: up to 64 tokens in one pass over the packed bytes, more by unpacking first."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Problem
from semisparse.formats.bitmask.division import Division, Processor, divide, tile_bytes
from semisparse.formats.bitmask.layouts import layout_of
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

MAX_DECODE_TOKENS = 64

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

OUTPUTS = {**SCALARS, torch.float32: "float"}

UNIT = 8
"""Values in 16 bytes."""

UNPACK_WARPS = 4

UNPACK_STAGES = 2

UNPACK_BLOCKS = 3
"""A processor: 12 warps, of 18 KB of shared memory each at 32:64."""


def _decode_defines(
    dtype: torch.dtype, out: torch.dtype, keep: int, tokens: int, splits: int, teams: int, stages: int
) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "OUT": OUTPUTS[out],
        "KEEP": keep,
        "TOKENS": tokens,
        "SPLITS": splits,
        "TEAMS": teams,
        "STAGES": stages,
    }


def _unpack_defines(keep: int) -> Defines:
    return {"KEEP": keep, "WARPS": UNPACK_WARPS, "STAGES": UNPACK_STAGES}


# What is compiled depends on the pattern and the shape: here are the common cases and the extremes.
DECODE = CudaSource(
    Path(__file__).with_name("tiled_decode.cu"),
    (
        *(
            _decode_defines(torch.float16, torch.float16, keep, tokens, splits, teams, 2)
            for keep, tokens, splits, teams in ((1, 8, 8, 1), (32, 1, 6, 1), (64, 16, 4, 2), (32, 32, 2, 4))
        ),
        _decode_defines(torch.bfloat16, torch.float32, 32, 64, 1, 8, 2),
    ),
)

UNPACK = CudaSource(Path(__file__).with_name("tiled_unpack.cu"), tuple(_unpack_defines(keep) for keep in (31, 64)))

SOURCES = (DECODE, UNPACK)

DENSE_BYTES = 16 * 4 * (64 * 2 + 16)
"""Of shared memory, for a warp's dense tile: kDenseBytes in tiled_unpack.cu."""

OVERRUN = 256
"""Bytes past the last tile that may be read: kOverrun in tiled.cuh."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def decode_refusal(problem: Problem) -> str | None:
    """Say why `decode` cannot compute ``problem`` here, or None if it can."""
    if not 1 <= problem.m <= MAX_DECODE_TOKENS:
        return f"takes 1 to {MAX_DECODE_TOKENS} tokens, got {problem.m}"
    return unpack_refusal(problem)


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != "tiles":
        return "reads the layout tiles, this weight is stored in rows"
    if problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def decode(
    x: Tensor, packed: Packed, bias: Tensor | None, out_dtype: torch.dtype | None = None, early: bool = False
) -> Tensor:
    """Multiply 1 to 64 tokens straight from the packed bytes.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype and the layout ``tiles``.
        bias: [N] or None.
        out_dtype: float16, bfloat16 or float32; x's own if None.
        early: whether the launch may begin before the kernel before it on the stream has ended (Hopper and later). It
            waits before it reads x and before it writes, but not before it reads the weights: nothing that still runs
            may be writing them.
    Returns:
        [M, N], accumulated in float32.
    """
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    tiles = packed.tensors["tiles"]
    (m, k), n = x.shape, packed.shape[0]
    y = torch.empty((m, n), dtype=out_dtype or x.dtype, device=x.device)
    row_tiles, column_tiles, _ = tiles.shape
    keep = values_per_block(packed.pattern) or 0
    division = divide(m, row_tiles, column_tiles, keep, processor(x.device))
    kernel = _decode_kernel(x.device, x.dtype, y.dtype, keep, division)
    pointers = (x.data_ptr(), tiles.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr())
    vectors = int(k % UNIT == 0 and x.data_ptr() % 16 == 0)
    sizes = (m, n, k, row_tiles, column_tiles, vectors, int(early))
    kernel(x.device, (division.blocks, 1, 1), 32 * division.warps, *pointers, *sizes, dependent=early)
    return y


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight at memory speed and let cuBLAS multiply.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype and the layout ``tiles``.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    return multiply_dense(x, unpack(packed), bias)


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K]; its rows begin at multiples of 16 bytes."""
    tiles = packed.tensors["tiles"]
    n, k = packed.shape
    pitch = -(-k // UNIT) * UNIT
    weight = torch.empty((n, pitch), dtype=packed.dtype, device=tiles.device)
    row_tiles, column_tiles, _ = tiles.shape
    count = row_tiles * column_tiles
    kernel = _unpack_kernel(tiles.device, values_per_block(packed.pattern) or 0)
    blocks = min(-(-count // UNPACK_WARPS), UNPACK_BLOCKS * processor(tiles.device).count)
    kernel(
        tiles.device,
        (blocks, 1, 1),
        32 * UNPACK_WARPS,
        tiles.data_ptr(),
        weight.data_ptr(),
        n,
        pitch,
        count,
        column_tiles,
    )
    return weight[:, :k]


@cache
def processor(device: torch.device) -> Processor:
    """Say what a GPU gives."""
    found = torch.cuda.get_device_properties(device)
    return Processor(found.multi_processor_count, found.shared_memory_per_multiprocessor)


@lru_cache(maxsize=256)
def _decode_kernel(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, keep: int, division: Division
) -> CudaKernel:
    defines = _decode_defines(dtype, out, keep, division.tokens, division.splits, division.teams, division.stages)
    cubin = compile_cubin(DECODE.path, device_facts(device).arch, defines)
    return CudaKernel(cubin, "semisparse_bitmask_tiled_decode", (*[_POINTER] * 4, *[_INT] * 7), division.shared)


@cache
def _unpack_kernel(device: torch.device, keep: int) -> CudaKernel:
    cubin = compile_cubin(UNPACK.path, device_facts(device).arch, _unpack_defines(keep))
    shared = UNPACK_WARPS * (UNPACK_STAGES * tile_bytes(keep) + DENSE_BYTES) + OVERRUN
    return CudaKernel(cubin, "semisparse_bitmask_tiled_unpack", (*[_POINTER] * 2, *[_INT] * 4), shared)

"""GPU kernels for the layout ``tiles``: up to 64 tokens in one pass over the packed bytes, more by unpacking first."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask import tiles
from semisparse.formats.bitmask.division import Division, Processor, divide, tile_bytes
from semisparse.formats.bitmask.layouts import layout_of
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
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


def prepare_decode(problem: Problem, out_dtype: torch.dtype | None = None, early: bool = False) -> Product:
    """Prepare to multiply 1 to 64 tokens straight from the packed bytes, in the layout ``tiles``.

    Args:
        problem: x and w float16, or both bfloat16.
        out_dtype: of y: float16, bfloat16 or float32; x's own if None.
        early: whether the launch may begin before the kernel before it on the stream has ended (Hopper and later). It
            waits before it reads x and before it writes, but not before it reads the weights: nothing that still runs
            may be writing them.
    Returns:
        The product, accumulated in float32.
    """
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    keep, out = values_per_block(problem.pattern) or 0, out_dtype or problem.dtype
    row_tiles, column_tiles = tile_counts(problem)
    division = divide(m, row_tiles, column_tiles, keep, processor(device))
    kernel = _decode_kernel(device, problem.dtype, out, keep, division)
    grid, threads, sizes = (division.blocks, 1, 1), 32 * division.warps, (m, n, k, row_tiles, column_tiles)
    in_units = k % UNIT == 0

    def decode(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        y = x.new_empty(m, n, dtype=out)
        start = x.data_ptr()
        pointers = (start, packed.tensors["tiles"].data_ptr(), address(bias), y.data_ptr())
        kernel(device, grid, threads, *pointers, *sizes, in_units and start % 16 == 0, early, dependent=early)
        return y

    return decode


def prepare_unpack_and_multiply(problem: Problem) -> Product:
    """Prepare to unpack the whole weight at memory speed and let cuBLAS multiply, in the layout ``tiles``."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Prepare to give the weight back, [N, K]; its rows begin at multiples of 16 bytes."""
    n, k, dtype, device = problem.n, problem.k, problem.weight_dtype, problem.device
    pitch = -(-k // UNIT) * UNIT
    row_tiles, column_tiles = tile_counts(problem)
    count = row_tiles * column_tiles
    kernel = _unpack_kernel(device, values_per_block(problem.pattern) or 0)
    grid = (min(-(-count // UNPACK_WARPS), UNPACK_BLOCKS * processor(device).count), 1, 1)

    def unpack(packed: Packed) -> Tensor:
        stored = packed.tensors["tiles"]
        weight = stored.new_empty(n, pitch, dtype=dtype)
        sizes = (n, pitch, count, column_tiles)
        kernel(device, grid, 32 * UNPACK_WARPS, stored.data_ptr(), weight.data_ptr(), *sizes)
        return weight if pitch == k else weight[:, :k]

    return unpack


def tile_counts(problem: Problem) -> tuple[int, int]:
    """Count the weight's tiles along N and K."""
    counts = tiles.counts(problem.n, problem.k, values_per_block(problem.pattern) or 0)
    return counts["row_tiles"], counts["column_tiles"]


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

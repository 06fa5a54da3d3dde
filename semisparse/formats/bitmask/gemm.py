"""The GPU kernel for many tokens in the layout ``tiles``: unpacked into the tensor cores' registers, on Hopper."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Problem
from semisparse.formats.bitmask.division import RESERVED_SHARED, Processor, tile_bytes
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.formats.bitmask.tiled import OVERRUN, SCALARS, processor, unpack_refusal
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

MOST_TOKENS = 65_535
"""Tokens are a dimension of the grid of tiled_columns.cu."""

TOKENS = (32, 64, 128, 192, 256)
"""Of a tile that a block computes."""

SLICE_BYTES = 128
"""Of x, for a token's columns of one slice."""

SLICES = 4
"""In a tile of the weight."""

COLUMN_THREADS = 256
"""Of a block of tiled_columns.cu; 32 take a token's columns of a tile."""


@dataclass(frozen=True)
class Grid:
    """How a product is dealt out.

    Args:
        tokens: of a block, one of `TOKENS`.
        warpgroups: of a block, 64 rows each.
        splits: blocks that share the columns.
        stages: tiles of the weight of each warp in flight or being read.
        blocks: that a processor holds at a time.
    """

    tokens: int
    warpgroups: int
    splits: int
    stages: int
    blocks: int

    def shared(self, keep: int) -> int:
        """Give the bytes of dynamic shared memory of a block."""
        weights = self.stages * self.warpgroups * 4 * tile_bytes(keep) + OVERRUN
        rings = SLICES * self.tokens * SLICE_BYTES + weights
        sums = self.tokens * (self.warpgroups * 64 + 4) * 4
        return max(rings, sums) + 16 * (self.stages + SLICES)


def _defines(dtype: torch.dtype, keep: int, grid: Grid) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "KEEP": keep,
        "TOKENS": grid.tokens,
        "WARPGROUPS": grid.warpgroups,
        "SPLITS": grid.splits,
        "STAGES": grid.stages,
        "BLOCKS": grid.blocks,
    }


COLUMNS = CudaSource(Path(__file__).with_name("tiled_columns.cu"), ({"TOKENS": 32}, {"TOKENS": 256}))

GEMM = CudaSource(
    Path(__file__).with_name("tiled_gemm.cu"),
    (
        _defines(torch.float16, 32, Grid(64, 2, 4, 2, 2)),
        _defines(torch.float16, 64, Grid(256, 2, 1, 1, 1)),
        _defines(torch.bfloat16, 31, Grid(32, 2, 1, 2, 2)),
        _defines(torch.bfloat16, 32, Grid(192, 2, 3, 2, 1)),
    ),
)

SOURCES = (COLUMNS, GEMM)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def refusal(problem: Problem) -> str | None:
    """Say why `multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.m > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens, got {problem.m}"
    reason = unpack_refusal(problem)
    if reason:
        return reason
    if torch.cuda.get_device_capability(problem.device) != (9, 0):
        return "needs wgmma, so compute capability 9.0 (Hopper)"
    return None


def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply any number of tokens, unpacking the weight on the way to the tensor cores.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype and the layout ``tiles``.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype, accumulated in float32.
    """
    row_tiles, column_tiles, _ = packed.tensors["tiles"].shape
    keep = values_per_block(packed.pattern) or 0
    return multiply_by(choose(x.shape[0], row_tiles, column_tiles, keep, processor(x.device)), x, packed, bias)


def multiply_by(grid: Grid, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply as dealt out by ``grid``; else as `multiply`."""
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    tiles = packed.tensors["tiles"]
    m, n = x.shape[0], packed.shape[0]
    row_tiles, column_tiles, _ = tiles.shape
    row_blocks, token_tiles = -(-row_tiles // (4 * grid.warpgroups)), -(-m // grid.tokens)
    columns, counters = columns_of(x, grid.tokens, column_tiles, token_tiles * row_blocks)
    handed = grid.splits * grid.tokens * grid.warpgroups * 64 if grid.splits > 1 else 0
    scratch = torch.empty(token_tiles * row_blocks * handed, dtype=torch.float32, device=x.device)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    operands = (columns, tiles, bias, y, scratch, counters)
    pointers = [None if operand is None else operand.data_ptr() for operand in operands]
    kernel = _gemm_kernel(x.device, x.dtype, values_per_block(packed.pattern) or 0, grid)
    blocks, threads = (grid.splits, row_blocks, token_tiles), 128 * (grid.warpgroups + 1)
    # It may begin early: all that it takes from the kernel before are columns and counters, and it waits for those.
    kernel(x.device, blocks, threads, *pointers, m, n, row_tiles, column_tiles, dependent=True)
    return y


def columns_of(x: Tensor, tokens: int, column_tiles: int, count: int) -> tuple[Tensor, Tensor]:
    """Give x, [M, K], as tiled_gemm.cu takes it; the next kernel on the stream may begin before this one has ended.

    Returns:
        columns: [token tiles, slices, tokens, 64] in x's dtype; tiled_columns.cu gives their order.
        counters: [count] int32, zeros.
    """
    x = x.contiguous()
    m, k = x.shape
    token_tiles = -(-m // tokens)
    columns = torch.empty((token_tiles, SLICES * column_tiles, tokens, 64), dtype=x.dtype, device=x.device)
    counters = torch.empty(count, dtype=torch.int32, device=x.device)
    blocks = (-(-32 * column_tiles // COLUMN_THREADS), token_tiles * tokens, 1)
    sizes = (m, k, column_tiles, count, int(k % 2 == 0 and x.data_ptr() % 4 == 0))
    pointers = (x.data_ptr(), columns.data_ptr(), counters.data_ptr())
    _columns_kernel(x.device, tokens)(x.device, blocks, COLUMN_THREADS, *pointers, *sizes)
    return columns, counters


@lru_cache(maxsize=256)
def _gemm_kernel(device: torch.device, dtype: torch.dtype, keep: int, grid: Grid) -> CudaKernel:
    cubin = compile_cubin(GEMM.path, device_facts(device).arch, _defines(dtype, keep, grid))
    return CudaKernel(cubin, "semisparse_bitmask_tiled_gemm", (*[_POINTER] * 6, *[_INT] * 4), grid.shared(keep))


@cache
def _columns_kernel(device: torch.device, tokens: int) -> CudaKernel:
    cubin = compile_cubin(COLUMNS.path, device_facts(device).arch, {"TOKENS": tokens})
    return CudaKernel(cubin, "semisparse_bitmask_tiled_columns", (*[_POINTER] * 3, *[_INT] * 5))


@lru_cache(maxsize=1024)
def choose(m: int, row_tiles: int, column_tiles: int, keep: int, gpu: Processor) -> Grid:
    """Choose how a product is dealt out.

    Args:
        m: tokens.
        row_tiles: tiles of the weight along N.
        column_tiles: tiles along K.
        keep: values a block.
        gpu: what it runs on.
    """
    tokens = next((size for size in TOKENS if m <= size), TOKENS[-1])
    return min(
        (grid for splits in SPLITS for grid in fitting(tokens, 2, splits, 2 if tokens <= 64 else 1, keep, gpu)),
        key=lambda grid: _work(grid, m, row_tiles, column_tiles, gpu),
    )


SPLITS = (1, 2, 3, 4, 5, 6, 8)


def fitting(tokens: int, warpgroups: int, splits: int, blocks: int, keep: int, gpu: Processor) -> list[Grid]:
    """Give the grid of that division with the most stages that fit, if any do."""
    room = gpu.shared // blocks - RESERVED_SHARED
    grids = (Grid(tokens, warpgroups, splits, stages, blocks) for stages in (3, 2, 1))
    return next(([grid] for grid in grids if grid.shared(keep) <= room), [])


def _work(grid: Grid, m: int, row_tiles: int, column_tiles: int, gpu: Processor) -> float:
    if grid.splits > column_tiles:
        return float("inf")
    blocks = -(-row_tiles // (4 * grid.warpgroups)) * -(-m // grid.tokens)
    slots = gpu.count * grid.blocks
    return -(-blocks * grid.splits // slots) * (-(-column_tiles // grid.splits) + 2)

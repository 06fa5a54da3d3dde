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

MOST_TOKENS = {1 << 24: 1024, 1 << 22: 512, 0: 128}
"""Above, `tiled_unpack` is faster, or nearly; by the fewest weights of a matrix."""

SPLIT = {32: ((1, 3),), 64: ((1, 3),), 128: ((3, 1), (2, 1), (1, 2)), 192: ((2, 1),), 256: ((2, 1),)}
"""By the tokens of a tile: the warpgroups of a block and the blocks of a processor worth trying, where shares are whole
parts of a tile."""

SPREAD = (2, 2)
"""The warpgroups of a block and the blocks of a cluster where shares end anywhere; a processor has one block."""

PLACES = ((3, 2), (3, 1), (2, 1), (1, 1))
"""Stages of the weight and of x, the best first."""

MOST_SPLITS = 8

FEWEST_TOKENS = 17
"""`tiled_decode` is faster below."""

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
        tokens: of a block, one of `SPLIT`.
        warpgroups: of a block, 64 rows each.
        cluster: blocks that send one another x.
        splits: shares that are one tile of y; 0 if shares end anywhere.
        stages: tiles of the weight of each warp in flight or being read.
        x_stages: the same of x, tiles of 256 columns.
        blocks: that a processor holds at a time.
    """

    tokens: int
    warpgroups: int
    cluster: int
    splits: int
    stages: int
    x_stages: int
    blocks: int

    def shared(self, keep: int) -> int:
        """Give the bytes of dynamic shared memory of a block."""
        weights = self.stages * self.warpgroups * 4 * tile_bytes(keep) + OVERRUN
        x = self.x_stages * SLICES * self.tokens * SLICE_BYTES
        return x + weights + 16 * (self.stages + self.x_stages * SLICES)

    def tiles(self, m: int, row_tiles: int) -> int:
        """Count the tiles of y."""
        return -(-row_tiles // (4 * self.warpgroups * self.cluster)) * -(-m // self.tokens)

    def shares(self, m: int, row_tiles: int, column_tiles: int, processors: int) -> int:
        """Count the shares of the work, one for each cluster."""
        tiles = self.tiles(m, row_tiles)
        if self.splits:
            return tiles * self.splits
        return min(tiles * column_tiles, self.blocks * processors // self.cluster)


def _defines(dtype: torch.dtype, keep: int, grid: Grid) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "KEEP": keep,
        "TOKENS": grid.tokens,
        "WARPGROUPS": grid.warpgroups,
        "CLUSTER": grid.cluster,
        "SPLITS": grid.splits,
        "STAGES": grid.stages,
        "X_STAGES": grid.x_stages,
        "BLOCKS": grid.blocks,
    }


COLUMNS = CudaSource(Path(__file__).with_name("tiled_columns.cu"), ({"TOKENS": 32}, {"TOKENS": 256}))

GEMM = CudaSource(
    Path(__file__).with_name("tiled_gemm.cu"),
    (
        _defines(torch.float16, 32, Grid(64, 2, 2, 0, 3, 2, 1)),
        _defines(torch.float16, 64, Grid(256, 2, 2, 0, 1, 1, 1)),
        _defines(torch.bfloat16, 31, Grid(32, 1, 1, 4, 3, 1, 3)),
        _defines(torch.bfloat16, 32, Grid(192, 2, 1, 4, 3, 1, 1)),
    ),
)

SOURCES = (COLUMNS, GEMM)

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def pays(problem: Problem) -> bool:
    """Say whether no other kernel is clearly faster, by what was measured on an H200 at 32:64."""
    weights = problem.n * problem.k
    return FEWEST_TOKENS <= problem.m <= next(most for fewest, most in MOST_TOKENS.items() if weights >= fewest)


def refusal(problem: Problem) -> str | None:
    """Say why `multiply` cannot compute ``problem`` here, or None if it can."""
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
    blocks = grid.cluster * grid.shares(m, row_tiles, column_tiles, processor(x.device).count)
    warps = 4 * grid.warpgroups
    columns, counters = columns_of(x, grid.tokens, column_tiles, blocks * warps)
    handed = 0 if grid.splits == 1 else blocks * warps * 16 * grid.tokens
    scratch = torch.empty(handed, dtype=torch.float32, device=x.device)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    operands = (columns, tiles, bias, y, scratch, counters)
    pointers = [None if operand is None else operand.data_ptr() for operand in operands]
    kernel = _gemm_kernel(x.device, x.dtype, values_per_block(packed.pattern) or 0, grid)
    # It may begin early: all that it takes from the kernel before are columns and counters, and it waits for those.
    kernel(x.device, (blocks, 1, 1), 32 * warps + 128, *pointers, m, n, row_tiles, column_tiles, dependent=True)
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
    tokens = next((size for size in SPLIT if m <= size), max(SPLIT))
    grids = [
        grid
        for warpgroups, blocks in SPLIT[tokens]
        for splits in range(1, min(MOST_SPLITS, column_tiles) + 1)
        for grid in fitting(tokens, warpgroups, 1, splits, blocks, keep, gpu)
    ]
    grids += fitting(tokens, *SPREAD, 0, 1, keep, gpu)
    return min(grids, key=lambda grid: _microseconds(grid, m, row_tiles, column_tiles, gpu.count))


def fitting(
    tokens: int, warpgroups: int, cluster: int, splits: int, blocks: int, keep: int, gpu: Processor
) -> list[Grid]:
    """Give the grid of that division with the most stages that fit, if any do."""
    room = gpu.shared // blocks - RESERVED_SHARED
    grids = (Grid(tokens, warpgroups, cluster, splits, *places, blocks) for places in PLACES)
    return next(([grid] for grid in grids if grid.shared(keep) <= room), [])


def _microseconds(grid: Grid, m: int, row_tiles: int, column_tiles: int, processors: int) -> float:
    """Estimate the time on an H200 at 32:64, within 6 % (rms) of 476 and 4 % of 74 products of 32 to 2,048 tokens."""
    tokens = grid.tokens / 64
    shares = grid.shares(m, row_tiles, column_tiles, processors)
    if not grid.splits:
        units = grid.warpgroups * grid.tiles(m, row_tiles) * column_tiles / shares
        return 8.4 + units * (0.61 + 0.227 * tokens) + 0.94 * grid.warpgroups * tokens
    busiest = -(-shares // processors)
    waves = -(-busiest // grid.blocks)
    tiles = -(-column_tiles // grid.splits)
    rows = busiest * grid.warpgroups
    handing_over = 1.57 + 0.61 * rows * tokens if grid.splits > 1 else 0.0
    return 1.03 * (rows * tiles * (0.477 + 0.197 * tokens) + waves * (3.2 + 0.52 * tiles) + handing_over)

"""The GPU kernel for many tokens in the layout ``tiles``: unpacked into the tensor cores' registers, on Hopper."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.division import RESERVED_SHARED, Processor, tile_bytes
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.formats.bitmask.tiled import OVERRUN, SCALARS, processor, tile_counts, unpack_refusal
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address, places_of
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


def prepare(problem: Problem, grid: Grid | None = None) -> Product:
    """Prepare to multiply any number of tokens, unpacking the weight on the way to the tensor cores.

    Args:
        problem: x and w float16, or both bfloat16, w in the layout ``tiles``.
        grid: how the product is dealt out; the one that should be fastest if None.
    Returns:
        The product, accumulated in float32.
    """
    m, n, device, gpu = problem.m, problem.n, problem.device, processor(problem.device)
    row_tiles, column_tiles = tile_counts(problem)
    keep = values_per_block(problem.pattern) or 0
    grid = grid or choose(m, row_tiles, column_tiles, keep, gpu)
    blocks = grid.cluster * grid.shares(m, row_tiles, column_tiles, gpu.count)
    warps = 4 * grid.warpgroups
    shape, order = prepare_columns(problem, grid.tokens, blocks * warps)
    handed = 0 if grid.splits == 1 else blocks * warps * 16 * grid.tokens
    *places, size = places_of(math.prod(shape) * problem.dtype.itemsize, 4 * blocks * warps, 4 * handed)
    kernel = _gemm_kernel(device, problem.dtype, keep, grid)
    at, sizes = ((blocks, 1, 1), 32 * warps + 128), (m, n, row_tiles, column_tiles)

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        y = x.new_empty(m, n)
        room = x.new_empty(size, dtype=torch.uint8)
        begin = room.data_ptr()
        columns, counters, scratch = [begin + place for place in places]
        order(x, columns, counters)
        pointers = (columns, packed.tensors["tiles"].data_ptr(), address(bias), y.data_ptr(), scratch, counters)
        # It may begin early: all that it takes from the kernel before are columns and counters, and it waits for those.
        kernel(device, *at, *pointers, *sizes, dependent=True)
        return y

    return multiply


def prepare_columns(
    problem: Problem, tokens: int, count: int
) -> tuple[tuple[int, ...], Callable[[Tensor, int, int], None]]:
    """Prepare the pass over x before the product; the next kernel on the stream may begin before this one has ended.

    Args:
        problem: whose x, [M, K], is to be ordered.
        tokens: of a tile.
        count: of the counters.
    Returns:
        The shape of x as tiled_gemm.cu takes it, [token tiles, slices, tokens, 64] in x's dtype (tiled_columns.cu gives
        its order), and what launches the pass, given x and the addresses of that and of the counters, int32, which are
        set to 0.
    """
    m, k, device = problem.m, problem.k, problem.device
    column_tiles, token_tiles = tile_counts(problem)[1], -(-m // tokens)
    kernel = _columns_kernel(device, tokens)
    blocks = (-(-32 * column_tiles // COLUMN_THREADS), token_tiles * tokens, 1)

    def launch(x: Tensor, columns: int, counters: int) -> None:
        x = x.contiguous()
        start = x.data_ptr()
        in_pairs = k % 2 == 0 and start % 4 == 0
        kernel(device, blocks, COLUMN_THREADS, start, columns, counters, m, k, column_tiles, count, in_pairs)

    return (token_tiles, SLICES * column_tiles, tokens, 64), launch


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

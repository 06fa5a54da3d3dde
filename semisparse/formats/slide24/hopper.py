"""Products on Hopper's sparse tensor cores: sums, scales, bias and cast in one launch (sparse.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from semisparse.formats.slide24.layout import TOKEN_BYTES
from semisparse.formats.slide24.tiles import ROWS, tile_bytes
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin, unavailable

ARCHITECTURE = "sm_90a"
"""wgmma is Hopper's alone."""

SHARED_BYTES = 223 << 10
"""Dynamic shared memory of a block; barriers and scales take the rest."""

THREADS = 128
"""Of a warp group."""

SKEW = 2
"""Blocks of K' that a warp group is ahead of the next, so that one writes while the others multiply."""

TURN = 16
"""Tokens that a warp group writes at a time."""

KINDS = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8", torch.bfloat16: "BF16", torch.float16: "FP16"}

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True)
class Tiling:
    """How y is divided.

    Args:
        tokens: of a thread block.
        groups: warp groups of a thread block, 64 rows each.
        cluster: thread blocks that share their tokens.
        block_us: of 128 bytes of K', when every processor is busy, on an H200.
        finish_us: of scaling and writing a tile of y.
    """

    tokens: int
    groups: int
    cluster: int
    block_us: float
    finish_us: float

    def stage_bytes(self, itemsize: int) -> int:
        """Give the shared memory of a stage of the pipeline."""
        return self.tokens * TOKEN_BYTES + self.groups * tile_bytes(itemsize)

    def stages(self, itemsize: int) -> int:
        """Count the stages that shared memory has room for."""
        return (SHARED_BYTES - self.desk_bytes) // self.stage_bytes(itemsize)

    @property
    def desk_bytes(self) -> int:
        """Give the shared memory that warp groups write y from."""
        return self.groups * (2 * TURN * ROWS * 2 + 4 * self.tokens)

    def clusters(self, m: int, tiles: int) -> int:
        """Count the clusters of thread blocks that ``m`` tokens and 64 * ``tiles`` rows are divided into."""
        return -(-m // self.tokens) * -(-tiles // (self.groups * self.cluster))

    def waves(self, m: int, tiles: int, processors: int) -> int:
        """Count the tiles that the busiest processor computes."""
        return -(-self.clusters(m, tiles) // (processors // self.cluster))


TILINGS = (
    Tiling(256, 2, 2, 0.435, 3.9),
    Tiling(192, 3, 2, 0.488, 5.0),
    Tiling(128, 2, 2, 0.330, 1.8),
    Tiling(64, 2, 1, 0.228, 1.5),
)
"""Paces are of int8, whole waves of two depths (K' of 5,376 and 28,416) compared."""


MOST_PARTS = 16

PART_US, ADDED_US = 3.0, 0.5
"""What a part of K costs beside its blocks, and what each part costs the one that adds them."""


@dataclass(frozen=True)
class Division:
    """How a product is divided over the processors: y in tiles, of which those that fill no wave may be cut along K."""

    tiling: Tiling
    parts: int = 1

    def whole(self, m: int, tiles: int, processors: int) -> int:
        """Count the tiles of y, a cluster each, that are in one piece; those after them are cut."""
        clusters = self.tiling.clusters(m, tiles)
        return clusters if self.parts == 1 else clusters - clusters % (processors // self.tiling.cluster)

    def fits(self, m: int, tiles: int, processors: int) -> bool:
        """Say whether the parts are computed all at once."""
        cut = self.tiling.clusters(m, tiles) - self.whole(m, tiles, processors)
        return cut * self.parts <= processors // self.tiling.cluster

    def us(self, m: int, tiles: int, blocks: int, processors: int) -> float:
        """Estimate the time of ``m`` tokens, 64 * ``tiles`` rows and 128 * ``blocks`` bytes of K'."""
        tiling, at_once = self.tiling, processors // self.tiling.cluster
        whole = self.whole(m, tiles, processors)
        us = -(-whole // at_once) * (blocks * tiling.block_us + tiling.finish_us)
        cut = tiling.clusters(m, tiles) - whole
        if not cut:
            return us
        part = -(-blocks // self.parts) * tiling.block_us + PART_US
        return us + part + self.parts * ADDED_US + tiling.finish_us


DIVISIONS = tuple(Division(tiling, parts) for tiling in TILINGS for parts in range(1, MOST_PARTS + 1))


@lru_cache(maxsize=4096)
def choose_division(m: int, tiles: int, blocks: int, processors: int) -> Division:
    """Take the division that should be fastest: whole waves of tiles, and parts in one at most, at measured paces."""
    possible = (d for d in DIVISIONS if d.parts <= blocks and d.fits(m, tiles, processors))
    return min(possible, key=lambda division: division.us(m, tiles, blocks, processors))


def defines(tiling: Tiling, dtype: torch.dtype, out: torch.dtype) -> dict[str, str | int]:
    """Give the macros of a build."""
    return {
        KINDS[dtype]: 1,
        "OUT": SCALARS[out],
        "TOKENS": tiling.tokens,
        "GROUPS": tiling.groups,
        "CLUSTER": tiling.cluster,
        "STAGES": tiling.stages(dtype.itemsize),
        "SKEW": SKEW,
    }


SOURCE = CudaSource(
    Path(__file__).with_name("sparse.cu"),
    (
        *(defines(tiling, torch.int8, torch.bfloat16) for tiling in TILINGS),
        *(defines(TILINGS[0], dtype, dtype) for dtype in SCALARS),
        *(defines(TILINGS[0], torch.float8_e4m3fn, out) for out in SCALARS),
    ),
    architectures=(ARCHITECTURE,),
)

SOURCES = (SOURCE,)

_POINTER = ctypes.c_void_p
_PARAMETERS = (*[_POINTER] * 8, *[ctypes.c_int] * 6)


def refusal(device: torch.device) -> str | None:
    """Say why this kernel cannot run on a GPU, or None if it can."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "is for Hopper (compute capability 9.0)"
    return unavailable()


def count_counters(tiles: int, m: int, division: Division, processors: int) -> int:
    """Say in how many int32, set to 0 before, a product counts: one for each warp group's rows of a tile in parts."""
    tiling = division.tiling
    cut = tiling.clusters(m, tiles) - division.whole(m, tiles, processors)
    return cut * tiling.cluster * tiling.groups


def prepare(
    shape: tuple[int, int, int, int], dtype: torch.dtype, out: torch.dtype, division: Division, device: torch.device
) -> tuple[int, Callable[..., None]]:
    """Prepare to compute ``x @ w.T``, scaled, with the bias.

    Args:
        shape: M, N, blocks and tiles of the weight.
        dtype: of the lifted x and of the weight.
        out: of y: float16 or bfloat16.
        division: how to divide the work.
        device: where.
    Returns:
        The bytes that the parts of K leave their sums in, and what launches the product, given addresses: of the
        weight's tiles [blocks, tiles, bytes]; x, lifted, in tiles [blocks, tokens, 128 bytes], tokens a multiple of the
        tiling's; scales of the tokens [M] and of the rows [N], float32, null for a weight as it is; bias [N] in ``out``
        or null; y [M, N]; those sums; the counters, all 0, which they are not any more afterwards.
    """
    m, n, blocks, count = shape
    tiling, parts, processors = division.tiling, division.parts, device_facts(device).processors
    counters = count_counters(count, m, division, processors)
    sums = 4 * counters * parts * ROWS * tiling.tokens  # of 32 bits, of whatever kind
    whole = division.whole(m, count, processors)
    pieces = whole + (tiling.clusters(m, count) - whole) * parts
    grid = (min(pieces, processors // tiling.cluster) * tiling.cluster, 1, 1)
    kernel = _kernel(device, dtype, out, tiling)

    def launch(*addresses: int) -> None:
        kernel(device, grid, THREADS * (tiling.groups + 1), *addresses, m, n, blocks, count, whole, parts)

    return sums, launch


@cache
def _kernel(device: torch.device, dtype: torch.dtype, out: torch.dtype, tiling: Tiling) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, defines(tiling, dtype, out))
    shared = tiling.stages(dtype.itemsize) * tiling.stage_bytes(dtype.itemsize) + tiling.desk_bytes
    return CudaKernel(cubin, "semisparse_slide24_sparse", _PARAMETERS, shared)

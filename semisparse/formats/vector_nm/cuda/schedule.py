"""Schedules of the GEMMs: tiles of y, stages along K, shared memory. Pure arithmetic, no CUDA calls.

A stage is the next slots (README.md, "Layout") of every group of rows in the tile. *Without packing* its buffer holds
all columns of x in the stage's windows, *with packing* only those that some group of the tile keeps (section III-C).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from semisparse.patterns import VectorNM
from semisparse.runtime.device import RESERVED_SHARED
from semisparse.runtime.nvrtc import Defines

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
"""The CUDA types of x, w, bias and y."""

WARP = 32

PORTABLE_SHARED = 99 << 10
"""Bytes of shared memory that a CTA may use on every GPU from compute capability 8.0 on."""

MAX_DENSITY = 0.3
"""Highest density at which 16-bit GEMMs on the packed weight are used instead of unpacking for cuBLAS.

At 12:32v32, 8:32v32 and 4:32v32 `gemm` takes 0.69 to 1.47, 0.50 to 1.17 and 0.30 to 0.78 times as long as unpacking
(bfloat16, 64 to 4,096 tokens, three shapes, H200; results/h200/vector_nm-bfloat16.csv). At 12:32v32 `gemm_sparse` only
equals unpacking.
"""

PACKING_SHARE = 0.5
"""Columns are packed if the groups of a tile together keep less than this share of a window's columns (section III-A).

Microseconds at 4:32v32 with and without packing: four groups per tile 231 and 240, eight 236 and 223 (float32,
M = 2,048, N x K = 4096 x 4096, H200).
"""

MAX_UNPACKED_COLUMNS = 128
"""Maximum columns of x per stage without packing."""

WARP_ROWS = 32
"""Rows of y per warp."""

MAX_COLUMN_PASSES = {2: 16, 4: 8}
"""With packing: maximum columns per stage that a thread copies, by bytes of an element. The thread
keeps their indices in registers."""

MAX_TOGETHER = 2
"""In float32, the CTAs of an SM end together if there are at most this many. The SM then starts as many new ones, while
other SMs may have none. So 344 CTAs of 128 x 128 on 132 SMs take 722 us; at three per SM they would take 578 (16:32v32,
M = 512, N x K = 11008 x 4096, H200). Not measured in 16 bits."""

HIDING_WARPS = 4
"""Warps per SM that are enough to hide latency; with fewer, time grows in inverse proportion."""


@dataclass(frozen=True)
class Tile:
    """A CTA's tile of y.

    Args:
        m: tokens.
        n: rows.
        per_thread: tokens per thread (float32), or m16 tiles per warp (16 bits).
        ctas_per_sm: CTAs per SM that shared memory should have room for.
        cost: time per output relative to the largest tile's, measured on an H200.
        max_slots: maximum slots per stage; their 16-bit weights stay in the registers of a warp.
    """

    m: int
    n: int
    per_thread: int
    ctas_per_sm: int
    cost: float
    max_slots: int

    def threads(self, itemsize: int) -> int:
        """Threads per CTA."""
        warp_m = self.per_thread * (16 if itemsize == 2 else 8)
        return WARP * (self.m // warp_m) * (self.n // WARP_ROWS)

    def time(self, m: int, n: int, itemsize: int, sms: int) -> float:
        """Estimate a GEMM's time, in outputs that the busiest SM would compute at the largest tile's cost."""
        count = -(-m // self.m) * -(-n // self.n)
        tiles = -(-count // sms)
        resident = min(tiles, self.ctas_per_sm)
        if itemsize == 4 and resident <= MAX_TOGETHER:
            tiles = resident * -(-count // (resident * sms))
        warps = resident * self.threads(itemsize) // WARP
        return tiles * self.m * self.n * self.cost * max(1.0, HIDING_WARPS / warps)

    def groups(self, length: int) -> int:
        """Groups of rows in the tile."""
        return max(1, self.n // length)

    def used_share(self, pattern: VectorNM) -> float:
        """Expected share of a window that some group of the tile keeps, if groups choose independently."""
        return float(1 - (1 - pattern.density) ** self.groups(pattern.length))


TILES = {
    4: (
        Tile(128, 256, 16, 1, 1.0, 32),
        Tile(128, 128, 16, 2, 1.03, 32),
        Tile(64, 128, 8, 4, 1.16, 32),
        Tile(32, 64, 4, 8, 1.21, 32),
    ),
    2: (Tile(128, 128, 8, 2, 1.0, 48), Tile(64, 128, 4, 3, 1.25, 64), Tile(64, 64, 4, 6, 1.4, 64)),
}
"""Tiles by bytes of an element, the largest first. An mma takes 16 slots; a stage has two such steps where they fit."""


@dataclass(frozen=True)
class GemmSchedule:
    """Compile-time configuration of gemm.cu or gemm_fp32.cu.

    One stage is the paper's V1 (without packing) or V2 (with packing), more are its V3.

    Args:
        tile: the tile of y that a CTA computes.
        length: rows per vector.
        slots: slots of each group per stage.
        columns: columns of x that a stage has room for.
        stages: buffers; with 1, copying and computing alternate.
        packed: whether a stage holds only the columns that some group of the tile keeps.
        dtype: dtype of x and w.
    """

    tile: Tile
    length: int
    slots: int
    columns: int
    stages: int
    packed: bool
    dtype: torch.dtype

    @property
    def defines(self) -> Defines:
        """Preprocessor macros, by name."""
        return {
            "SCALAR": SCALARS[self.dtype],
            "TILE_M": self.tile.m,
            "TILE_N": self.tile.n,
            "THREADS": self.threads,
            "WARP_M_TILES" if self.dtype.itemsize == 2 else "THREAD_M": self.tile.per_thread,
            "LENGTH": self.length,
            "STAGE_SLOTS": self.slots,
            "STAGE_COLUMNS": self.columns,
            "STAGES": self.stages,
            "PACKED": int(self.packed),
        }

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.tile.threads(self.dtype.itemsize)

    @property
    def groups(self) -> int:
        """Groups of rows in the tile."""
        return self.tile.groups(self.length)

    @property
    def column_bytes(self) -> int:
        """Bytes of a column of x in shared memory; in 16 bits with a pad against bank conflicts."""
        return (self.tile.m + (16 if self.dtype.itemsize == 2 else 0)) * self.dtype.itemsize

    @property
    def column_passes(self) -> int:
        """Columns of a stage that a thread copies: a 16-byte chunk of each."""
        columns_per_pass = self.threads * 16 // (self.tile.m * self.dtype.itemsize)
        return -(-self.columns // columns_per_pass)

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as pipeline.cuh and gemm_fp32.cu lay it out."""
        stage = self.columns * self.column_bytes
        if self.dtype.itemsize == 4:
            group_rows = min(self.length, self.tile.n)
            group = self.slots * group_rows + (group_rows if group_rows < WARP_ROWS else 0)
            stage += self.groups * 4 * (group + self.slots)
        return self.stages * stage

    def intensity(self, pattern: VectorNM, k: int) -> float:
        """Operations per byte that a CTA moves: the paper's equation 3 over all of K, y written once."""
        tokens, rows = self.tile.m, self.tile.n
        slots = -(-k // pattern.window) * pattern.keep
        columns: float = self.columns
        if self.packed:
            columns = min(columns, self.tile.used_share(pattern) * self.slots / pattern.density)
        moved = slots / self.slots * tokens * columns + slots * rows + tokens * rows
        return 2 * tokens * rows * slots / (self.dtype.itemsize * moved)


def gemm_lengths(itemsize: int) -> tuple[int, ...]:
    """Return the vector lengths, in rows, that the tiled GEMMs support: powers of two of at least 16 bytes."""
    return tuple(length for length in (4, 8, 16, 32, 64, 128) if length * itemsize >= 16)


@cache
def choose_gemm(
    pattern: VectorNM, m: int, n: int, dtype: torch.dtype, sms: int, limit: int = PORTABLE_SHARED
) -> GemmSchedule | None:
    """Return the schedule of least estimated time; None if the pattern has none.

    Args:
        pattern: the weight's pattern.
        m: tokens.
        n: rows of w.
        dtype: dtype of x and w.
        sms: SMs of the GPU.
        limit: bytes of shared memory that a CTA may take.
    """
    if pattern.length not in gemm_lengths(dtype.itemsize):
        return None
    for tile in sorted(TILES[dtype.itemsize], key=lambda tile: tile.time(m, n, dtype.itemsize, sms)):
        packed = tile.used_share(pattern) < PACKING_SHARE
        schedule = gemm_schedule(pattern, tile, dtype, packed, limit)
        schedule = schedule or gemm_schedule(pattern, tile, dtype, not packed, limit)
        if schedule:
            return schedule
    return None


def gemm_schedule(
    pattern: VectorNM, tile: Tile, dtype: torch.dtype, packed: bool, limit: int = PORTABLE_SHARED
) -> GemmSchedule | None:
    """Return the schedule of a tile with the longest stages that fit, two or three of them; None if none fit.

    Stages whose column list fits registers and which leave room for ``tile.ctas_per_sm`` CTAs are preferred.

    Args:
        pattern: the weight's pattern.
        tile: the tile of y that a CTA computes.
        dtype: dtype of x and w.
        packed: whether columns are packed.
        limit: bytes of shared memory that a CTA may take.
    """
    step, max_slots = 4, tile.max_slots
    if dtype.itemsize == 2:  # each group of a warp's rows has slots of its own
        step, max_slots = 16, max(16, tile.max_slots * min(pattern.length, WARP_ROWS) // WARP_ROWS)
    sizes = _packed_sizes(pattern, tile) if packed else _unpacked_sizes(pattern)
    schedules = [
        GemmSchedule(tile, pattern.length, slots, columns, stages, packed, dtype)
        for slots, columns in sizes
        for stages in (3, 2)
        if slots % step == 0 and slots <= max_slots
    ]
    resident = (limit + RESERVED_SHARED) // tile.ctas_per_sm - RESERVED_SHARED

    def faults(schedule: GemmSchedule) -> tuple[bool, bool]:
        too_many = packed and schedule.column_passes > MAX_COLUMN_PASSES[dtype.itemsize]
        return too_many, schedule.shared > resident

    return min((s for s in schedules if s.shared <= limit), key=faults, default=None)


def _unpacked_sizes(pattern: VectorNM) -> Iterator[tuple[int, int]]:
    """Yield the slots and columns of stages without packing, the longest first."""
    for windows in range(MAX_UNPACKED_COLUMNS // pattern.window, 0, -1):
        yield windows * pattern.keep, windows * pattern.window


def _packed_sizes(pattern: VectorNM, tile: Tile) -> Iterator[tuple[int, int]]:
    """Yield the slots, and the maximum columns, of stages with packing, the longest first."""
    for slots in (32, 16, 8, 4):
        aligned = slots % pattern.keep == 0 or pattern.keep % slots == 0
        windows = -(-slots // pattern.keep) if aligned else (slots - 1) // pattern.keep + 2
        yield slots, min(tile.groups(pattern.length) * slots, windows * pattern.window)


# gemm_sparse

SPARSE_LENGTHS = (32, 64, 128)
"""Vector lengths, in rows, that gemm_sparse.cu supports: two warps of a wgmma share a metadata word."""
SPARSE_TILE_M, SPARSE_TILE_N = 128, 256
"""Tokens and rows per CTA tile."""
SPARSE_THREADS = 384
SPARSE_STAGES = 12
SPARSE_STAGE_BYTES = (16 << 10) + 64 + 16
"""Bytes per stage: x and the weights of a block of 32 columns, its metadata, two mbarriers."""
SPARSE_MIN_M = 1024
"""M from which `gemm_sparse` beats unpacking for cuBLAS.

With 2,048 and 4,096 tokens it is 1.07 to 1.25 times as fast at 8:32v32 and 1.48 to 1.78 times at 4:32v32 (H200, three
shapes, results/h200/vector_nm-bfloat16.csv); with 512 tokens and 4,096 rows only half of the SMs have a tile.
"""

"""Schedules of the GPU kernels: tiles, stages and split-K of gemm.cu, threads of lift.cu, spans of unpack.cu.

Pure arithmetic. What is compiled depends on the bucket of M; grids and split-K depend on the exact M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from semisparse.formats.slide24.storage.gpu import K_TILE_BYTES, ROWS, tile_bytes

THREADS = 128
"""Threads per warpgroup."""

STAGGER = 2
"""K tiles that a warpgroup is ahead of the next one, so that its epilogue overlaps the other's wgmma."""

EPILOGUE_TOKENS = 16
"""Tokens that a warpgroup writes to y at a time."""

GEMM_STATIC_SHARED = 4 << 10
"""Bytes of shared memory per CTA that are reserved for the mbarriers of gemm.cu, and for alignment."""

SMALL_STATIC_SHARED = 1 << 10
"""The same for the other kernels."""

MAX_SPLITS = 16

H200_SPLIT_US, H200_REDUCE_US = 3.0, 0.5
"""Measured microseconds: what a split costs beside its K tiles, and what each split costs the CTA that adds them."""

H200_GEMM_TO_CUBLAS = 0.74
"""Measured: time per lifted column of the 16-bit gemm.cu over cuBLAS's time per column: 0.72 to 0.77 (2:4, 6:8, 8:10
of Qwen2.5-7B's layers, 2,048 to 8,192 tokens)."""

H200_UNPACK_TOKENS = 250
"""Unpacking a 16-bit weight takes about as long as this many tokens in cuBLAS; measured: 70 to 330."""


@dataclass(frozen=True)
class CtaTile:
    """The part of a GEMM's schedule that is compiled in.

    Args:
        tokens: tokens per CTA tile of y.
        warpgroups: consumer warpgroups per CTA, 64 rows of w each.
        cluster: CTAs per cluster, which share their tokens.
        h200_k_tile_us: measured microseconds per K tile, in int8, all SMs busy; whole waves at K' = 5,376 and 28,416
            were compared.
        h200_epilogue_us: measured microseconds to scale and write the tile of y.
    """

    tokens: int
    warpgroups: int
    cluster: int
    h200_k_tile_us: float
    h200_epilogue_us: float

    @property
    def threads(self) -> int:
        """Threads per CTA: consumers and the producer warpgroup."""
        return THREADS * (self.warpgroups + 1)

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of the epilogue staging buffers: two steps of y and the tokens' scales, per warpgroup."""
        return self.warpgroups * (2 * EPILOGUE_TOKENS * ROWS * 2 + 4 * self.tokens)

    def stage_bytes(self, itemsize: int) -> int:
        """Return the bytes of a stage: a K tile of the tokens and one of each warpgroup's rows."""
        return self.tokens * K_TILE_BYTES + self.warpgroups * tile_bytes(itemsize)

    def stages(self, itemsize: int, shared_per_cta: int) -> int:
        """Return the number of stages that fit in shared memory."""
        return (shared_per_cta - GEMM_STATIC_SHARED - self.epilogue_bytes) // self.stage_bytes(itemsize)

    def shared_bytes(self, itemsize: int, shared_per_cta: int) -> int:
        """Return the bytes of dynamic shared memory per CTA."""
        return self.stages(itemsize, shared_per_cta) * self.stage_bytes(itemsize) + self.epilogue_bytes

    def count(self, m: int, row_tiles: int) -> int:
        """Return the number of tiles of y[m, 64 * row_tiles], where a cluster's CTA tiles count as one tile."""
        return -(-m // self.tokens) * -(-row_tiles // (self.warpgroups * self.cluster))


CTA_TILES = (
    CtaTile(256, 2, 2, 0.435, 3.9),
    CtaTile(192, 3, 2, 0.488, 5.0),
    CtaTile(128, 2, 2, 0.330, 1.8),
    CtaTile(64, 2, 1, 0.228, 1.5),
)


@dataclass(frozen=True)
class Schedule:
    """How gemm.cu divides a GEMM among the SMs. Tiles of y that do not fill a wave of clusters may be split along K'.

    Args:
        tile: the tile of a CTA.
        splits: parts of K' per split tile.
    """

    tile: CtaTile
    splits: int = 1

    def whole_tiles(self, m: int, row_tiles: int, sms: int) -> int:
        """Return the number of tiles of y, one per cluster, that are not split. The tiles after them are."""
        tiles = self.tile.count(m, row_tiles)
        return tiles if self.splits == 1 else tiles - tiles % (sms // self.tile.cluster)

    def split_tiles(self, m: int, row_tiles: int, sms: int) -> int:
        """Return the number of tiles of y that are split."""
        return self.tile.count(m, row_tiles) - self.whole_tiles(m, row_tiles, sms)

    def fits(self, m: int, row_tiles: int, sms: int) -> bool:
        """Return whether all splits run in one wave. No CTA waits for another, so more would be slow but not wrong."""
        return self.split_tiles(m, row_tiles, sms) * self.splits <= sms // self.tile.cluster

    def h200_us(self, m: int, row_tiles: int, k_tiles: int, sms: int) -> float:
        """Estimate the GEMM's time on an H200, in microseconds."""
        tile, clusters = self.tile, sms // self.tile.cluster
        waves = -(-self.whole_tiles(m, row_tiles, sms) // clusters)
        us = waves * (k_tiles * tile.h200_k_tile_us + tile.h200_epilogue_us)
        if not self.split_tiles(m, row_tiles, sms):
            return us
        split = -(-k_tiles // self.splits) * tile.h200_k_tile_us + H200_SPLIT_US
        return us + split + self.splits * H200_REDUCE_US + tile.h200_epilogue_us


def choose(m: int, row_tiles: int, k_tiles: int, sms: int, tiles: tuple[CtaTile, ...] = CTA_TILES) -> Schedule:
    """Return the schedule that should be fastest.

    Args:
        m: tokens: the bucket's maximum to choose a tile, the call's own number to choose the splits of a given tile.
        row_tiles: tiles of 64 rows of w.
        k_tiles: tiles of 128 bytes of K'.
        sms: SMs of the GPU.
        tiles: the CTA tiles to choose from.
    """
    schedules = (Schedule(tile, splits) for tile in tiles for splits in range(1, min(MAX_SPLITS, k_tiles) + 1))
    able = (schedule for schedule in schedules if schedule.fits(m, row_tiles, sms))
    return min(able, key=lambda schedule: schedule.h200_us(m, row_tiles, k_tiles, sms))


@dataclass(frozen=True)
class Launch:
    """What depends on the exact M in a launch of the GEMM.

    Args:
        tokens: M rounded up to a multiple of the tile's tokens.
        ctas: CTAs of the grid.
        whole_tiles: as in `Schedule.whole_tiles`.
        splits: as in `Schedule.splits`.
        arrivals: number of counters of finished splits: one for each warpgroup's rows of a split tile.
        partial_bytes: bytes of the splits' accumulators, 32 bits each.
    """

    tokens: int
    ctas: int
    whole_tiles: int
    splits: int
    arrivals: int
    partial_bytes: int


def launch_of(tile: CtaTile, m: int, row_tiles: int, k_tiles: int, sms: int) -> Launch:
    """Return the launch of a GEMM with a compiled ``tile``, for exactly ``m`` tokens."""
    schedule = choose(m, row_tiles, k_tiles, sms, (tile,))
    split, whole = schedule.split_tiles(m, row_tiles, sms), schedule.whole_tiles(m, row_tiles, sms)
    arrivals = split * tile.cluster * tile.warpgroups
    clusters = min(whole + split * schedule.splits, sms // tile.cluster)
    partial_bytes = 4 * arrivals * schedule.splits * ROWS * tile.tokens
    return Launch(m + -m % tile.tokens, clusters * tile.cluster, whole, schedule.splits, arrivals, partial_bytes)


VECTOR_COLUMNS = 8
"""Columns of x that a thread of lift.cu loads at once: 16 bytes."""

LIFT_VECTORS = (2, 4, 8)
"""Vectors that a thread keeps in registers. More, with fewer threads, are faster if the tokens fill the GPU (H200):
4096 x 3584 to int8 takes 16.7 us with 8 and 18.3 with 4; 64 x 3584 takes 3.8 with 8, 3.0 with 4, 2.6 with 2."""

H200_FILLING_THREADS = 100_000
"""Measured: threads, over all CTAs, that fill the GPU."""

MIN_LIFT_THREADS, MAX_LIFT_THREADS, WARP = 64, 640, 32
"""Threads per CTA of lift.cu, and per warp."""


@dataclass(frozen=True)
class LiftSchedule:
    """How lift.cu lifts a token.

    Args:
        vectors: vectors that a thread keeps in registers; compiled in.
        threads: threads per CTA.
    """

    vectors: int
    threads: int


@lru_cache(maxsize=4096)
def choose_lift(m: int, k: int) -> LiftSchedule:
    """Return the schedule for M tokens of K columns, with M the maximum of a bucket."""
    loads = -(-k // VECTOR_COLUMNS)
    able = [vectors for vectors in LIFT_VECTORS if loads <= vectors * MAX_LIFT_THREADS] or [LIFT_VECTORS[-1]]
    filling = [vectors for vectors in able if m * loads >= vectors * H200_FILLING_THREADS]
    vectors = max(filling, default=able[0])
    threads = -(-loads // vectors // WARP) * WARP
    return LiftSchedule(vectors, min(MAX_LIFT_THREADS, max(MIN_LIFT_THREADS, threads)))


def reciprocal_of(group_pairs: int) -> int:
    """Return 2^32 / ``group_pairs``, rounded up: the upper 32 bits of i times it are i // group_pairs, for small i."""
    return -(-(1 << 32) // group_pairs)


UNPACK_THREADS = 256
"""Threads per CTA of unpack.cu."""


@dataclass(frozen=True)
class UnpackSpan:
    """What a CTA of unpack.cu unpacks: some K tiles of 64 rows.

    Args:
        k_tiles: the fewest K tiles that hold whole groups.
        columns: columns of the weight that these unpack to.
        shared_bytes: bytes of shared memory per CTA: 64 rows of these columns, each row with 16 bytes of padding.
    """

    k_tiles: int
    columns: int
    shared_bytes: int


def unpack_span(window: int, itemsize: int) -> UnpackSpan:
    """Return the span for groups of ``window`` columns and values of ``itemsize`` bytes."""
    group_windows, tile_windows = window // 2 - 1, K_TILE_BYTES // itemsize // 4
    k_tiles = group_windows // gcd(group_windows, tile_windows)
    columns = k_tiles * tile_windows // group_windows * window
    return UnpackSpan(k_tiles, columns, ROWS * (columns * itemsize + 16))

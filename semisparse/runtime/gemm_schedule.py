"""Schedules of the GEMMs of cuda/expand_gemm: tiles, shared memory and grids, and a choice by estimated times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.kernel import offsets_in_workspace
from semisparse.runtime.nvrtc import Defines

ROWS, COLUMNS = 16, 256
"""Rows and columns of a weight tile."""

MAX_TOKENS = 65_280
"""Maximum M that has been tested."""

TILES_M = (16, 32, 64, 128, 192, 256)
"""Tokens per CTA tile."""

STAGES = ((4, 2), (3, 2), (3, 1), (2, 1), (1, 1))
"""Stages of the weight and of x, the best first."""

MAX_SPLIT_K = 8
"""Maximum number of ranges that K is split into."""

MAX_TOKENS_OF_TWO_PRODUCERS = 128
"""Maximum tile_m with two producer warpgroups: with more, too few registers per thread are left at launch."""

PERMUTE_WARPS, PERMUTE_UNROLL = 4, 3
"""Warps per CTA of permute_x.cu, and the (token, column tile) pairs that each warp loads at a time: kUnroll."""

PERMUTE_CTAS_PER_SM = 8
"""Maximum CTAs per SM of permute_x.cu. With one, 256 tokens of 11,008 columns took 7 us longer."""

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The macro SCALAR, by the dtype of x, the weight and y."""


@dataclass(frozen=True)
class Tiles:
    """A weight as tiles of 16 rows by 256 columns.

    Args:
        row_tiles: tiles along N.
        column_tiles: tiles along K.
        tile_bytes: bytes of shared memory per weight tile.
        extra_per_warp: bytes of shared memory per consumer warp beside the stages: those of ``Weights::kExtraBytes``.
        max_stages: maximum weight stages.
        slow_copies: whether one producer warpgroup cannot copy as fast as three consumer warpgroups expand.
    """

    row_tiles: int
    column_tiles: int
    tile_bytes: int
    extra_per_warp: int = 0
    max_stages: int = 4
    slow_copies: bool = False


@dataclass(frozen=True)
class Schedule:
    """How expand_gemm/gemm.cuh computes y.

    Args:
        tile_m: tokens per CTA tile: one of `TILES_M`, or 160 for experts.
        warpgroups: consumer warpgroups per CTA, 64 rows each.
        cluster: CTAs that multicast x to one another.
        split_k: ranges of K per output tile, one cluster each; 0 for Stream-K.
        stages: weight stages, each with one tile per consumer warp.
        x_stages: stages of x, each with 256 columns.
        ctas_per_sm: resident CTAs per SM.
        producers: producer warpgroups per CTA.
        split_in_cluster: whether the ranges of an output tile are one cluster, whose CTAs exchange partial accumulators
            through shared memory (split_k above 1, cluster 1).
    """

    tile_m: int
    warpgroups: int
    cluster: int
    split_k: int
    stages: int
    x_stages: int
    ctas_per_sm: int
    producers: int = 1
    split_in_cluster: bool = False

    @property
    def warps(self) -> int:
        """Consumer warps per CTA."""
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * self.warps + 128 * self.producers

    def defines(self, dtype: torch.dtype) -> Defines:
        """Return the macros of gemm.cuh: the fields in capitals, and SCALAR."""
        return {"SCALAR": SCALARS[dtype], **{name.upper(): int(value) for name, value in asdict(self).items()}}

    def shared(self, weight: Tiles) -> int:
        """Return the bytes of dynamic shared memory per CTA."""
        mbarriers = 16 * (self.stages + 4 * self.x_stages) + (8 * self.warps if self.split_in_cluster else 0)
        return self._stage_bytes(weight) + self.warps * weight.extra_per_warp + mbarriers

    def _stage_bytes(self, weight: Tiles) -> int:
        return self.x_stages * self.tile_m * 2 * COLUMNS + self.stages * self.warps * weight.tile_bytes

    def can_receive(self, weight: Tiles) -> bool:
        """Return whether the stages' memory takes the partial accumulators that come from the cluster's other CTAs."""
        share = -(-self.tile_m // (8 * max(self.split_k, 1))) * 8  # tokens: kShareGroups of stream_k.cuh
        received = self.split_k * share * self.warps * ROWS * 4
        return not self.split_in_cluster or received <= self._stage_bytes(weight)

    def tiles(self, m: int, weight: Tiles) -> int:
        """Return the number of output tiles: tile_m tokens by the rows of a cluster."""
        return -(-weight.row_tiles // (self.warps * self.cluster)) * -(-m // self.tile_m)

    def ranges(self, m: int, weight: Tiles, sms: int) -> int:
        """Return the number of ranges of the work, one per cluster."""
        tiles = self.tiles(m, weight)
        if self.split_k:
            return tiles * self.split_k
        return min(tiles * weight.column_tiles, self.ctas_per_sm * sms // self.cluster)


@dataclass(frozen=True)
class Launch:
    """The grids of a GEMM of M tokens, and its workspace.

    Args:
        ctas: CTAs of the GEMM's grid.
        tokens: M, rounded up to a multiple of tile_m.
        permute_ctas: CTAs of permute_x.cu's grid.
        counters: number of counters, one per consumer warp of the GEMM's grid.
        offsets: byte offsets in the workspace of the permuted x, the counters and the partial accumulators.
        workspace: bytes of the workspace.
    """

    ctas: int
    tokens: int
    permute_ctas: int
    counters: int
    offsets: tuple[int, ...]
    workspace: int


def launch_of(schedule: Schedule, m: int, weight: Tiles, sms: int) -> Launch:
    """Size the grids and the workspace of a GEMM."""
    ctas = schedule.cluster * schedule.ranges(m, weight, sms)
    tokens = -(-m // schedule.tile_m) * schedule.tile_m
    through_memory = schedule.split_k != 1 and not schedule.split_in_cluster
    counters = ctas * schedule.warps if through_memory else 0
    partials = counters * ROWS * schedule.tile_m
    permuted = 2 * COLUMNS * weight.column_tiles * tokens
    *offsets, size = offsets_in_workspace(permuted, 4 * counters, 4 * partials)
    per_cta = PERMUTE_WARPS * PERMUTE_UNROLL
    permute_ctas = min(-(-tokens * weight.column_tiles // per_cta), PERMUTE_CTAS_PER_SM * sms)
    return Launch(ctas, tokens, permute_ctas, counters, tuple(offsets), size)


def tile_m_of(m: int, sizes: Iterable[int] = TILES_M) -> int:
    """Return the smallest of the tiles' sizes that takes M tokens, or the largest of all."""
    sizes = sorted(sizes)
    return next((size for size in sizes if m <= size), sizes[-1])


def fit(
    weight: Tiles,
    gpu: DeviceFacts,
    tile_m: int,
    warpgroups: int,
    cluster: int,
    split_k: int,
    ctas_per_sm: int,
    split_in_cluster: bool = False,
) -> Schedule | None:
    """Return the schedule with the most stages that fit in shared memory, or None if none does."""
    # Leave RESERVED_SHARED for each CTA of the GEMM, and for one CTA of permute_x, beside which they start.
    room = (gpu.shared_per_sm - RESERVED_SHARED) // ctas_per_sm - RESERVED_SHARED
    producers = 2 if weight.slow_copies and warpgroups >= 3 and tile_m <= MAX_TOKENS_OF_TWO_PRODUCERS else 1
    schedules = (
        Schedule(tile_m, warpgroups, cluster, split_k, *stages, ctas_per_sm, producers, split_in_cluster)
        for stages in STAGES
        if stages[0] <= weight.max_stages
    )
    return next((one for one in schedules if one.shared(weight) <= room and one.can_receive(weight)), None)


Shape = tuple[int, int, int]
"""Warpgroups per CTA, CTAs per cluster, CTAs per SM."""

STREAM_K: Mapping[int, tuple[Shape, ...]] = {
    16: ((1, 1, 3), (4, 1, 1)),
    32: ((1, 1, 3), (4, 1, 1)),
    64: ((1, 1, 3), (2, 1, 2), (3, 1, 1)),
    128: ((2, 1, 1), (3, 1, 1)),
    192: ((2, 1, 1), (2, 2, 1)),
    256: ((2, 1, 1), (2, 2, 1)),
}
"""The shapes that `choose` tries with Stream-K, by tile_m."""

SPLIT_K: Mapping[int, tuple[Shape, ...]] = {
    16: ((1, 1, 3),),
    32: ((1, 1, 3),),
    64: ((1, 1, 3), (2, 1, 2)),
    128: ((1, 1, 2), (2, 1, 1), (3, 1, 1)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1),),
}
"""The shapes that `choose` tries with a split_k of 1 to `MAX_SPLIT_K`, by tile_m."""

RANGES_IN_CLUSTER = 2
"""The split_k with which the ranges of an output tile are a cluster. It gains 0.4 us on average and up to 1.4 (bitmask,
12288 x 4096, 128 tokens: 30.9 instead of 32.3). Clusters of 3 and 5 equal the exchange through global memory; of 4, 6
and 8 are 2 to 15 us slower, because fewer of them are resident than an SM's memory would allow
(results/h200/sweeps/split-in-cluster.csv)."""

FILLED = 0.55
"""With split-K, the grid has at least this fraction of the CTAs that can be resident, if K can be split so often.
Smaller grids were not timed."""

TOKENS_OF_FEW_TILES, SMALL_TILES_FACTOR = 384, 1.13
"""Above so many tokens estimates of tiles of 128 tokens are 2 to 14 % too low, and those of 256 tokens 1 to 9 % too
high: gqs at 4096 x 11008 takes 78.5 us with 128 and 71.7 with 256 (512 tokens,
results/h200/sweeps/split-in-cluster.csv)."""


@dataclass(frozen=True)
class Rates:
    """How fast a format expands weight tiles, for `choose`; fitted to times on an H200.

    The times are in results/h200/sweeps/gemm256.csv; for masked weights in 8 and 4 bits, in
    results/h200/sweeps/bitmask-codes.csv.

    Args:
        expand_us: microseconds in which an SM expands a weight tile.
        overlap: the exponent p of the time of a tile, (expand^p + wgmma^p)^(1/p): 1 if nothing overlaps.
    """

    expand_us: float
    overlap: float


MAX_CROWDED_TOKENS = 32
"""Maximum M of GEMMs that start early whose CTAs are taken to crowd onto the SMs where the kernel before ends first: of
256 CTAs, three of which fit an SM, some SMs have three and others none. So K is split in six instead of four where N is
4,096. Steps of 8 blocks of llama2-7b with 32 sequences take 929 us instead of 990 (gqs), 1,092 and 1,141 (bitmask), 999
and 1,024 (vector_nm), 1,069 and 1,129 (ec_csr; results/h200/sweeps/crowded.csv). Only 32 tokens were measured."""


def choose(m: int, weight: Tiles, gpu: DeviceFacts, rates: Rates, early: bool = False) -> Schedule:
    """Choose the schedule of a format's GEMM: by estimate the fastest of Stream-K and of split-K by 1 to 8.

    Above 128 tokens, tiles of 128 tokens are compared with those of `tile_m_of`: with 128 each weight is expanded more
    often, but CTAs exchange fewer partial accumulators.

    Args:
        m: maximum tokens.
        weight: its tiles.
        gpu: what it runs on.
        rates: the format's.
        early: whether it may start while the kernels before still run (`Problem.constant`).
    """
    crowded = early and m <= MAX_CROWDED_TOKENS
    largest = tile_m_of(m)
    candidates = []
    for tile_m in sorted({min(largest, 128), largest}):
        candidates += [_fit(weight, gpu, tile_m, shape, 0) for shape in STREAM_K[tile_m]]
        for shape in SPLIT_K[tile_m]:
            candidates += _splits(m, weight, gpu, tile_m, shape)
    fitting = [schedule for schedule in candidates if schedule]

    def microseconds(schedule: Schedule) -> float:
        factor = SMALL_TILES_FACTOR if m > TOKENS_OF_FEW_TILES and schedule.tile_m == 128 else 1
        return factor * h200_microseconds(schedule, m, weight, gpu.sms, rates, crowded)

    return min(fitting, key=microseconds)


def _splits(m: int, weight: Tiles, gpu: DeviceFacts, tile_m: int, shape: Shape) -> list[Schedule]:
    """Return the schedule without split-K, and those with split-K whose grid fits one wave and fills `FILLED` of it.

    If even the largest possible split_k fills less than that, it is the only one with split-K.
    """
    unsplit = _fit(weight, gpu, tile_m, shape, 1)
    if unsplit is None:
        return []
    tiles, resident = unsplit.tiles(m, weight), gpu.sms * unsplit.ctas_per_sm
    most = min(MAX_SPLIT_K, weight.column_tiles, resident // tiles)
    least = min(most, -(-int(FILLED * resident) // tiles))
    splits = (_fit(weight, gpu, tile_m, shape, split_k) for split_k in range(max(2, least), most + 1))
    return [unsplit, *(schedule for schedule in splits if schedule)]


def _fit(weight: Tiles, gpu: DeviceFacts, tile_m: int, shape: Shape, split_k: int) -> Schedule | None:
    warpgroups, cluster, ctas_per_sm = shape
    return fit(weight, gpu, tile_m, warpgroups, cluster, split_k, ctas_per_sm, split_k == RANGES_IN_CLUSTER)


def h200_microseconds(
    schedule: Schedule, m: int, weight: Tiles, sms: int, rates: Rates, crowded: bool = False
) -> float:
    """Estimate the time on an H200; ``crowded``: SMs where the kernel before ends first take as many CTAs as they can.

    The root mean square error is 5 % on 363 GEMMs of M 64 to 1,024 (run 4 of results/h200/sweeps/gemm256.csv). The
    schedules that it chooses there took 0.7 % longer than the fastest ones on average.
    """
    ctas = schedule.ranges(m, weight, sms) * schedule.cluster
    busiest = -(-ctas // sms)  # CTAs of the busiest SM
    # If permute_x has more CTAs than there are SMs, the GEMM's CTAs crowd onto the SMs where those end first.
    if crowded or launch_of(schedule, m, weight, sms).permute_ctas > sms:
        busiest = max(busiest, min(schedule.ctas_per_sm, ctas))
    waves = -(-busiest // schedule.ctas_per_sm)
    if schedule.split_k:
        iterations: float = -(-weight.column_tiles // schedule.split_k)
    else:
        iterations = schedule.tiles(m, weight) * schedule.cluster * weight.column_tiles / ctas
    wgmma = 0.0013 * schedule.tile_m
    tile = (rates.expand_us**rates.overlap + wgmma**rates.overlap) ** (1 / rates.overlap)
    x_megabytes = ctas * iterations * schedule.tile_m * 2 * COLUMNS / 1e6 / schedule.cluster
    outputs = schedule.tile_m * schedule.warpgroups
    exchange = 0.0
    if not schedule.split_k:
        exchange = 8.0 + 0.0077 * outputs
    elif schedule.split_k > 1:
        exchange = 3.2 + 0.0132 * outputs * (1 - 1 / schedule.split_k) - 0.4 * schedule.split_in_cluster
    tiles = busiest * iterations * schedule.warps
    return 2.6 + tiles * tile + 0.0121 * x_megabytes + exchange + 1.6 * (waves - 1) + 1.9 * (schedule.cluster - 1)

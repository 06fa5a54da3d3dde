"""GEMMs that expand each packed weight once for all tokens of a tile, on Hopper: cuda/expand_gemm, and its schedules.

A format has a .cu file with its own way to expand a tile of 16 rows by 256 columns; the rest is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts, device_facts
from semisparse.runtime.kernel import Argument, CudaSource, KernelBuild, offsets_in_workspace
from semisparse.runtime.nvrtc import HEADERS, Defines

ROWS, COLUMNS = 16, 256
"""Rows and columns of a weight tile."""

MAX_TOKENS = 65_280
"""Maximum M. permute_x.cu has a CTA row per token, for M rounded up to tile_m; a grid has at most 65,535 along y."""

TILES_M = (16, 32, 64, 128, 192, 256)
"""Tokens per CTA tile."""

STAGES = ((4, 2), (3, 2), (3, 1), (2, 1), (1, 1))
"""Stages of the weight and of x, the best first."""

MAX_SPLIT_K = 8

PERMUTE_THREADS = 256
"""Threads per CTA of permute_x.cu; 32 permute a token's columns of one tile."""

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""The macro SCALAR, by the dtype of x, the weight and y."""

PERMUTE_X = CudaSource(
    HEADERS / "expand_gemm" / "permute_x.cu", ({"TILE_M": 32, "BLOCK": 64}, {"TILE_M": 256, "BLOCK": 2})
)


@dataclass(frozen=True)
class Tiles:
    """A weight as tiles of 16 rows by 256 columns.

    Args:
        row_tiles: tiles along N.
        column_tiles: tiles along K.
        tile_bytes: bytes of shared memory per weight tile.
        extra: bytes of shared memory per CTA beside the stages: ``Weights::kExtraBytes``.
        extra_per_warp: the same, per consumer warp.
        max_stages: maximum weight stages.
    """

    row_tiles: int
    column_tiles: int
    tile_bytes: int
    extra: int = 0
    extra_per_warp: int = 0
    max_stages: int = 4


@dataclass(frozen=True)
class Schedule:
    """How expand_gemm/gemm.cuh computes y.

    Args:
        tile_m: tokens per CTA tile, of `TILES_M`.
        warpgroups: consumer warpgroups per CTA, 64 rows each.
        cluster: CTAs that multicast x to one another.
        split_k: ranges of K per output tile, each computed by another CTA; 0 for Stream-K.
        stages: weight stages, each with one tile per consumer warp.
        x_stages: stages of x, each with 256 columns.
        ctas_per_sm: resident CTAs per SM.
    """

    tile_m: int
    warpgroups: int
    cluster: int
    split_k: int
    stages: int
    x_stages: int
    ctas_per_sm: int

    @property
    def warps(self) -> int:
        """Consumer warps per CTA."""
        return 4 * self.warpgroups

    def defines(self, dtype: torch.dtype) -> Defines:
        """Return the macros of gemm.cuh: the fields in capitals, and SCALAR."""
        return {"SCALAR": SCALARS[dtype], **{name.upper(): value for name, value in asdict(self).items()}}

    def shared(self, weight: Tiles) -> int:
        """Return the bytes of dynamic shared memory per CTA."""
        x = self.x_stages * self.tile_m * 2 * COLUMNS
        mbarriers = 16 * (self.stages + 4 * self.x_stages)
        tiles = self.stages * self.warps * weight.tile_bytes
        return x + tiles + weight.extra + self.warps * weight.extra_per_warp + mbarriers

    def tiles(self, m: int, weight: Tiles) -> int:
        """Return the number of output tiles."""
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
        permute_grid: grid of permute_x.cu.
        counters: number of counters, one per consumer warp of the GEMM's grid.
        offsets: byte offsets in the workspace of the permuted x, the counters and the partial accumulators.
        workspace: bytes of the workspace.
    """

    ctas: int
    permute_grid: tuple[int, int, int]
    counters: int
    offsets: tuple[int, ...]
    workspace: int


def launch_of(schedule: Schedule, m: int, weight: Tiles, sms: int) -> Launch:
    """Size the grids and the workspace of a GEMM."""
    ctas = schedule.cluster * schedule.ranges(m, weight, sms)
    tokens = -(-m // schedule.tile_m) * schedule.tile_m
    counters = ctas * schedule.warps
    partials = 0 if schedule.split_k == 1 else counters * ROWS * schedule.tile_m
    permuted = 2 * COLUMNS * weight.column_tiles * tokens
    *offsets, size = offsets_in_workspace(permuted, 4 * counters, 4 * partials)
    grid = (-(-32 * weight.column_tiles // PERMUTE_THREADS), tokens, 1)
    return Launch(ctas, grid, counters, tuple(offsets), size)


def tile_m_of(m: int, sizes: Iterable[int] = TILES_M) -> int:
    """Return the smallest tile that takes M tokens, or the largest of all."""
    sizes = sorted(sizes)
    return next((size for size in sizes if m <= size), sizes[-1])


def fit(
    weight: Tiles, gpu: DeviceFacts, tile_m: int, warpgroups: int, cluster: int, split_k: int, ctas_per_sm: int
) -> Schedule | None:
    """Return the schedule with the most stages that fit in shared memory, or None if none does."""
    room = gpu.shared_per_sm // ctas_per_sm - RESERVED_SHARED
    schedules = (
        Schedule(tile_m, warpgroups, cluster, split_k, *stages, ctas_per_sm)
        for stages in STAGES
        if stages[0] <= weight.max_stages
    )
    return next((schedule for schedule in schedules if schedule.shared(weight) <= room), None)


Shape = tuple[int, int, int]
"""Warpgroups per CTA, CTAs per cluster, CTAs per SM."""

SPLIT_K: Mapping[int, Shape] = {
    16: (1, 1, 3),
    32: (1, 1, 3),
    64: (1, 1, 3),
    128: (1, 1, 2),
    192: (2, 1, 1),
    256: (2, 1, 1),
}
"""The fastest shape with split-K, by tile_m."""


@dataclass(frozen=True)
class Rates:
    """A format's rates for `choose`, measured on an H200 (results/h200/sweeps/expand-gemm.csv).

    Args:
        stream_k: by tile_m, shapes for Stream-K: `choose` takes the first that fits with three weight stages (two if
            tile_m is above 128), else the first that fits.
        tile_us: microseconds per weight tile on an SM, without tokens.
        token_us: additional microseconds per weight tile and token of tile_m.
    """

    stream_k: Mapping[int, tuple[Shape, ...]]
    tile_us: float
    token_us: float


def choose(m: int, weight: Tiles, gpu: DeviceFacts, rates: Rates) -> Schedule:
    """Choose the schedule of a format's GEMM: by estimate the fastest of Stream-K and of split-K by 1 to 8.

    Args:
        m: maximum tokens.
        weight: its tiles.
        gpu: what it runs on.
        rates: the format's.
    """
    tile_m = tile_m_of(m)
    enough = 3 if tile_m <= 128 else 2
    fitting = [schedule for shape in rates.stream_k[tile_m] if (schedule := _fit(weight, gpu, tile_m, shape, 0))]
    candidates = [next((schedule for schedule in fitting if schedule.stages >= enough), fitting[0])] if fitting else []
    for split_k in range(1, min(MAX_SPLIT_K, weight.column_tiles) + 1):
        schedule = _fit(weight, gpu, tile_m, SPLIT_K[tile_m], split_k)
        candidates += [schedule] if schedule else []
    return min(candidates, key=lambda schedule: _h200_microseconds(schedule, m, weight, gpu.sms, rates))


def _fit(weight: Tiles, gpu: DeviceFacts, tile_m: int, shape: Shape, split_k: int) -> Schedule | None:
    warpgroups, cluster, ctas_per_sm = shape
    return fit(weight, gpu, tile_m, warpgroups, cluster, split_k, ctas_per_sm)


def _h200_microseconds(schedule: Schedule, m: int, weight: Tiles, sms: int, rates: Rates) -> float:
    """Estimate the time on an H200, less 7.75 us that all schedules have in common.

    Rms error 9 %: 440 GEMMs of gqs and vector_nm (run 2 in results/h200/sweeps/expand-gemm.csv).
    """
    ctas = schedule.ranges(m, weight, sms) * schedule.cluster
    busiest = -(-ctas // sms)  # CTAs of the busiest SM
    waves = -(-busiest // schedule.ctas_per_sm)
    if schedule.split_k:
        iterations: float = -(-weight.column_tiles // schedule.split_k)
    else:
        iterations = schedule.tiles(m, weight) * schedule.cluster * weight.column_tiles / ctas
    resident = schedule.warpgroups * (min(busiest, schedule.ctas_per_sm) if waves == 1 else schedule.ctas_per_sm)
    tile = (rates.tile_us + rates.token_us * schedule.tile_m) * max(1.0, 3 / resident) ** 0.25
    outputs = schedule.tile_m * schedule.warpgroups
    exchange = {0: 3.2 + 0.015 * outputs, 1: 0.0}.get(schedule.split_k, 0.2 + 0.011 * outputs)
    return busiest * iterations * schedule.warps * tile + 3 * (waves - 1) + exchange


def prepare(
    kernel: Callable[[Schedule], KernelBuild],
    schedule: Schedule,
    weight: Tiles,
    block: int,
    shape: tuple[int, int],
    device: torch.device,
) -> Callable[[Tensor, Mapping[str, Argument], Tensor | None], Tensor]:
    """Compile and load a format's kernel and permute_x.cu.

    Args:
        kernel: returns the format's kernel for a schedule.
        schedule: how y is computed.
        weight: its tiles.
        block: BLOCK of permute_x.cu: consecutive columns that a lane takes in the weight fragments.
        shape: (N, K).
        device: where all operands are.
    Returns:
        (x [M, K], the kernel's own arguments, bias [N] or None) -> y [M, N], accumulated in float32.
    """
    n, k = shape
    sms = device_facts(device).sms
    permute_x = PERMUTE_X.build("semisparse_permute_x", {"TILE_M": schedule.tile_m, "BLOCK": block}).load(device)
    gemm = kernel(schedule).load(device)
    threads, even_k = 32 * schedule.warps + 128, k % 2 == 0
    row_tiles, column_tiles = weight.row_tiles, weight.column_tiles
    launch_for = lru_cache(maxsize=64)(lambda m: launch_of(schedule, m, weight, sms))

    def matmul(x: Tensor, operands: Mapping[str, Argument], bias: Tensor | None) -> Tensor:
        x, m = x.contiguous(), x.shape[0]
        launch = launch_for(m)
        y = x.new_empty(m, n)
        workspace = x.new_empty(launch.workspace, dtype=torch.uint8)
        begin = workspace.data_ptr()
        permuted, counters, partials = [begin + offset for offset in launch.offsets]
        permute_x(
            launch.permute_grid, PERMUTE_THREADS,
            x=x, permuted=permuted, counters=counters,
            m=m, k=k, column_tiles=column_tiles, counter_count=launch.counters,
            aligned=even_k and x.data_ptr() % 4 == 0,
        )  # fmt: skip
        # pdl: it may start before permute_x has ended, and waits before it uses the permuted x and the counters.
        gemm(
            (launch.ctas, 1, 1), threads, pdl=True,
            x=permuted, **operands, bias=None if bias is None else bias.to(x.dtype).contiguous(), y=y,
            partials=partials, counters=counters,
            m=m, n=n, row_tiles=row_tiles, column_tiles=column_tiles,
        )  # fmt: skip
        return y

    return matmul

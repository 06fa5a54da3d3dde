"""Matmuls of 1 to 64 tokens with a weight in tiles of 16 rows by 256 columns: schedules, launches of cuda/tile_decode.

A format has a .cu file with its own way to copy and expand a tile; the rest is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from semisparse.runtime.device import RESERVED_SHARED, DeviceFacts
from semisparse.runtime.gemm_schedule import COLUMNS, ROWS, SCALARS
from semisparse.runtime.kernel import Argument, LoadedKernel
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import bias_as

UNFUSED: Defines = {"RMS_NORM": 0, "ADD_RESIDUAL": 0, "SILU_MUL": 0}
"""The macros of fusion.cuh without a prologue and an epilogue."""

Shape = tuple[int, int, int]
"""warps_n, warps_k and stages of a `TileSchedule`."""


class Tiled(Protocol):
    """A weight's tiles along N and K, and the bytes of shared memory per tile."""

    @property
    def row_tiles(self) -> int: ...

    @property
    def column_tiles(self) -> int: ...

    @property
    def tile_bytes(self) -> int: ...


@dataclass(frozen=True)
class TileSchedule:
    """How tile_decode/decode.cuh computes y.

    Args:
        tile_m: maximum tokens (TILE_M).
        warps_n: row tiles that a CTA computes at a time.
        warps_k: warps per row tile, which split its column tiles among them (sliced-K).
        stages: weight tiles per warp in shared memory, in flight or being read.
        ctas: CTAs of the grid, at most as many as are resident; each strides over the row tiles.
        shared: bytes of dynamic shared memory per CTA.
    """

    tile_m: int
    warps_n: int
    warps_k: int
    stages: int
    ctas: int
    shared: int

    @property
    def warps(self) -> int:
        """Warps per CTA."""
        return self.warps_n * self.warps_k

    def defines(self, dtype: torch.dtype, fusion: Defines = UNFUSED) -> Defines:
        """Return the macros of decode.cuh; ``fusion`` has those of fusion.cuh."""
        return tile_defines(dtype, self.tile_m, self.warps_n, self.warps_k, self.stages, fusion)


def tile_defines(
    dtype: torch.dtype, tile_m: int, warps_n: int, warps_k: int, stages: int, fusion: Defines = UNFUSED
) -> Defines:
    """Return the macros of decode.cuh."""
    own: Defines = {
        "SCALAR": SCALARS[dtype],
        "TILE_M": tile_m,
        "WARPS_N": warps_n,
        "WARPS_K": warps_k,
        "STAGES": stages,
    }
    return {**own, **fusion}


def first_fitting(
    shapes: Iterable[Shape],
    m: int,
    weight: Tiled,
    warps_per_sm: Mapping[int, int],
    gpu: DeviceFacts,
    whole_x: bool = False,
) -> TileSchedule | None:
    """Return the schedule of the first shape that fits the GPU, or None; the arguments are those of `fit`."""
    fitting = (fit(shape, m, weight, warps_per_sm, gpu, whole_x) for shape in shapes)
    return next((schedule for schedule in fitting if schedule is not None), None)


def fit(
    shape: Shape, m: int, weight: Tiled, warps_per_sm: Mapping[int, int], gpu: DeviceFacts, whole_x: bool = False
) -> TileSchedule | None:
    """Return the schedule with as many CTAs as are resident, or None if no CTA fits.

    Args:
        shape: warps_n, warps_k and stages.
        m: maximum tokens.
        weight: its tiles.
        warps_per_sm: maximum resident warps per SM by tile_m, as the kernel's registers allow, in ascending order.
        gpu: what it runs on.
        whole_x: whether all of x is in shared memory, as in fused kernels.
    """
    (warps_n, warps_k, stages), tile_m = shape, next(tokens for tokens in warps_per_sm if m <= tokens)
    warps_k = min(warps_k, weight.column_tiles)
    warps = warps_n * warps_k
    x_tiles = weight.column_tiles if whole_x else stages * warps_k
    # Weight tiles, x tiles and accumulators, double-buffered.
    shared = stages * warps * weight.tile_bytes + x_tiles * m * 2 * COLUMNS + 2 * warps * tile_m * ROWS * 4
    resident = min(gpu.shared_per_sm // (shared + RESERVED_SHARED), warps_per_sm[tile_m] // warps)
    if not resident:
        return None
    ctas = min(-(-weight.row_tiles // warps_n), gpu.sms * resident)
    return TileSchedule(tile_m, warps_n, warps_k, stages, ctas, shared)


Decode = Callable[[Tensor, Mapping[str, Argument], Tensor | None, Mapping[str, Argument]], Tensor]
"""(x [M, K], the format's own arguments, bias [N] or None, the arguments of a prologue and an epilogue) -> y."""


def prepare(
    kernel: LoadedKernel,
    schedule: TileSchedule,
    weight: Tiled,
    shape: tuple[int, int],
    fused: bool,
    width: int,
    pdl: bool,
) -> Decode:
    """Return the matmul of a loaded kernel.

    Args:
        kernel: a format's kernel.
        schedule: how y is computed.
        weight: its tiles.
        shape: (N, K).
        fused: whether it has a prologue or an epilogue, so that x is copied in units of 16 bytes.
        width: columns of y.
        pdl: whether to use programmatic dependent launch.
    """
    (n, k), grid, threads = shape, (schedule.ctas, 1, 1), 32 * schedule.warps
    row_tiles, column_tiles, rows_align = weight.row_tiles, weight.column_tiles, k % 8 == 0

    def decode(
        x: Tensor, operands: Mapping[str, Argument], bias: Tensor | None, fusion: Mapping[str, Argument]
    ) -> Tensor:
        x, m = x.contiguous(), x.shape[0]
        x = x.clone() if fused and x.data_ptr() % 16 else x
        y = x.new_empty(m, width)
        kernel(
            grid, threads, pdl=pdl,
            x=x, **operands, bias=bias_as(bias, x.dtype), y=y, **fusion,
            m=m, n=n, k=k, row_tiles=row_tiles, column_tiles=column_tiles,
            x_aligned=rows_align and x.data_ptr() % 16 == 0,
        )  # fmt: skip
        return y

    return decode

"""A weight in tiles of 16 rows by 256 columns as a dense one: schedules, launches of cuda/tile_decode/unpack.cuh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.gemm_schedule import ROWS, SCALARS
from semisparse.runtime.kernel import Argument, LoadedKernel
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.tile_decode import Tiled

WARPS = 4
"""Warps per CTA."""

DENSE_TILE_BYTES = ROWS * 4 * (64 * 2 + 16)
"""Shared memory per warp for the tile that it expands: four padded blocks of 64 columns per row."""

CTAS_PER_SM = 3
"""Maximum CTAs per SM: 12 warps with 18 KB of shared memory each at 32:64."""


@dataclass(frozen=True)
class UnpackSchedule:
    """How unpack.cuh writes the dense weight.

    Args:
        stages: weight tiles per warp in shared memory: 2, or 1 where 2 do not fit.
        ctas: CTAs of the grid; each warp expands one tile at a time and strides over all tiles.
        shared: bytes of dynamic shared memory per CTA.
    """

    stages: int
    ctas: int
    shared: int

    def defines(self, dtype: torch.dtype) -> Defines:
        """Return the macros of unpack.cuh."""
        return {"SCALAR": SCALARS[dtype], "WARPS": WARPS, "STAGES": self.stages}


def choose_unpack(weight: Tiled, gpu: DeviceFacts) -> UnpackSchedule:
    """Return the schedule of unpack.cuh."""
    shared = {stages: WARPS * (stages * weight.tile_bytes + DENSE_TILE_BYTES) for stages in (1, 2)}
    stages = 2 if shared[2] <= gpu.shared_per_cta else 1
    ctas = min(-(-weight.row_tiles * weight.column_tiles // WARPS), CTAS_PER_SM * gpu.sms)
    return UnpackSchedule(stages, ctas, shared[stages])


def prepare(
    kernel: LoadedKernel, schedule: UnpackSchedule, weight: Tiled, shape: tuple[int, int]
) -> Callable[[Mapping[str, Argument], torch.dtype, torch.device], Tensor]:
    """Return a function from the kernel's own arguments, dtype and device to the weight.

    Args:
        kernel: a format's kernel.
        schedule: what it was compiled for.
        weight: its tiles.
        shape: (N, K).
    Returns:
        (arguments, dtype, device) -> [N, K], rows at multiples of 16 bytes.
    """
    (n, k), pitch = shape, -(-shape[1] // 8) * 8
    grid, threads, tile_count = (schedule.ctas, 1, 1), 32 * WARPS, weight.row_tiles * weight.column_tiles

    def unpack(arguments: Mapping[str, Argument], dtype: torch.dtype, device: torch.device) -> Tensor:
        w = torch.empty(n, pitch, dtype=dtype, device=device)
        kernel(
            grid, threads, pdl=False,
            **arguments, w=w, n=n, pitch=pitch, tile_count=tile_count, column_tiles=weight.column_tiles,
        )  # fmt: skip
        return w if pitch == k else w[:, :k]

    return unpack

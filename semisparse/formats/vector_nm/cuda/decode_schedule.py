"""Schedules of the decode kernels: tiles, warps, stages and panels of x. Pure arithmetic, no CUDA calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

import torch

from semisparse.formats.vector_nm.cuda.schedule import SCALARS
from semisparse.patterns import VectorNM
from semisparse.runtime.nvrtc import Defines

MAX_M = 16
"""Tokens that both kernels take at most."""

LENGTHS = (8, 16, 32, 64, 128)
"""Rows per vector that `decode` takes: a lane loads eight."""
TILE_M = (1, 2, 4, 8)
PANEL_BYTES = 96 << 10
"""Of x in shared memory at a time."""

TENSOR_LENGTHS = (16, 32, 64, 128)
"""Rows per vector that `decode_tensor` takes: an mma has 16."""
TENSOR_TILE_M = (1, 8, 16)
TENSOR_WARPS_STAGES = ((16, 2), (16, 1), (8, 2), (8, 1))
"""Warps per CTA, and tiles that each has in flight; the fastest first."""
TILE_SLOTS = 32
PANEL_CHUNK = 8
"""Columns of x that a thread copies at a time: 16 bytes of a row."""
MAX_FAST_PANELS = 3
"""So many panels of x cost less than fewer stages: 17.1 us in two, 18.0 in one (M = 8, 4096 x 11008, H200)."""


def _defines(pattern: VectorNM, dtype: torch.dtype, **more: int) -> Defines:
    return {
        "SCALAR": SCALARS[dtype],
        "KEEP": pattern.keep,
        "WINDOW": pattern.window,
        "LENGTH": pattern.length,
        **more,
    }


@dataclass(frozen=True)
class DecodeSchedule:
    """What decode.cu is compiled for.

    Args:
        tile_m: tokens per CTA.
        warps: per CTA.
        slots_ahead: slots whose loads a lane has in flight, twice.
    """

    pattern: VectorNM
    dtype: torch.dtype
    tile_m: int
    warps: int
    slots_ahead: int

    @property
    def defines(self) -> Defines:
        """The macros."""
        return _defines(self.pattern, self.dtype, TILE_M=self.tile_m, WARPS=self.warps, SLOTS_AHEAD=self.slots_ahead)

    def panel_windows(self, k: int) -> int:
        """Windows of x in shared memory at a time."""
        fitting = PANEL_BYTES // (self.pattern.window * self.tile_m * self.dtype.itemsize)
        return min(-(-k // self.pattern.window), max(1, fitting))

    def shared(self, k: int) -> int:
        """Bytes of shared memory: the panel and, in its place, the warps' partial sums."""
        panel = self.panel_windows(k) * self.pattern.window * self.tile_m * self.dtype.itemsize
        return max(panel, 4 * self.warps * self.pattern.length)


def choose_decode(pattern: VectorNM, dtype: torch.dtype, m: int, n: int, sms: int) -> DecodeSchedule:
    """Choose a schedule of decode.cu.

    16:32v32, one token, us at 4096 x 4096, 11008 x 4096, 28672 x 8192 (H200): 16 warps 8.0, 16.2, 68.9; 8 warps 8.8,
    14.1, 66.3; 8 warps with 4 slots ahead 8.1, 14.8, 68.4.
    """
    tile_m = next((tile for tile in TILE_M if tile >= m), TILE_M[-1])
    if tile_m == TILE_M[-1]:
        return DecodeSchedule(pattern, dtype, tile_m, warps=8, slots_ahead=4)
    one_wave = -(-n // pattern.length) <= sms
    return DecodeSchedule(pattern, dtype, tile_m, warps=16 if one_wave else 8, slots_ahead=2)


@dataclass(frozen=True)
class DecodeTensorSchedule:
    """What decode_tensor.cu is compiled for.

    Args:
        tile_m: tokens per CTA.
        warps: per CTA.
        stages: tiles of 32 slots that each warp has in flight.
    """

    pattern: VectorNM
    dtype: torch.dtype
    tile_m: int
    warps: int
    stages: int

    @property
    def tile_n(self) -> int:
        """Rows per CTA tile."""
        return min(self.pattern.length, 32)

    @property
    def defines(self) -> Defines:
        """The macros. For one token two CTAs fit an SM, so that the next kernel's can start beside this one's."""
        ctas = 2 if self.tile_m == 1 else 1
        more = {"TILE_N": self.tile_n, "TILE_M": self.tile_m, "WARPS": self.warps, "STAGES": self.stages}
        return _defines(self.pattern, self.dtype, **more, CTAS_PER_SM=ctas)

    def panel_chunks(self, windows: int) -> int:
        """Chunks of eight columns in so many windows."""
        return -(-windows * self.pattern.window // PANEL_CHUNK)

    def shared(self, windows: int) -> int:
        """Bytes of shared memory with a panel of so many windows, as decode_tensor.cu lists them."""
        weights = self.warps * self.stages * TILE_SLOTS * self.tile_n * 2
        column = 2 if self.tile_m == 1 else 16 * -(-self.tile_m // 8)
        partials = self.warps * self.tile_m * self.tile_n * 4
        exchange = self.warps * TILE_SLOTS * 2 if self.tile_m == 1 else 0
        return weights + self.panel_chunks(windows) * PANEL_CHUNK * column + partials + exchange

    def panel_windows(self, k: int, limit: int) -> int | None:
        """Return the windows per panel: as few equal panels as ``limit`` bytes hold; None if they hold none."""
        windows = -(-k // self.pattern.window)
        if self.shared(windows) <= limit:
            return windows
        # A panel ends with a tile, and the next begins at a multiple of eight columns.
        keep, window = self.pattern.keep, self.pattern.window
        step = lcm(TILE_SLOTS // gcd(keep, TILE_SLOTS), PANEL_CHUNK // gcd(window, PANEL_CHUNK))
        fitting = [count for count in range(step, windows, step) if self.shared(count) <= limit]
        if not fitting:
            return None
        panels = -(-windows // fitting[-1])
        return -(-windows // (panels * step)) * step


@cache
def choose_decode_tensor(
    pattern: VectorNM, dtype: torch.dtype, m: int, k: int, limit: int
) -> DecodeTensorSchedule | None:
    """Choose the first schedule with few panels in ``limit`` bytes, else that with the fewest; None if none fits."""
    tile_m = next(tile for tile in TENSOR_TILE_M if tile >= m)
    fitting = []
    for warps, stages in TENSOR_WARPS_STAGES:
        schedule = DecodeTensorSchedule(pattern, dtype, tile_m, warps, stages)
        windows = schedule.panel_windows(k, limit)
        if windows:
            fitting.append((max(MAX_FAST_PANELS, -(-k // (windows * pattern.window))), schedule))
    return min(fitting, key=lambda found: found[0], default=(0, None))[1]

"""Schedules of the decode kernels, decode.cu and decode_tensor.cu. Pure arithmetic, no CUDA calls.

A *group* is ``LENGTH`` consecutive rows that share kept columns. A *slot* is one kept column of a group: its position
in the window and the group's values (README.md, "Layout"). A *panel* is the columns of x that are in shared memory at a
time: whole windows along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

import torch

from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.cuda.schedule import SCALARS
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.device import DeviceFacts
from semisparse.runtime.nvrtc import Defines

MAX_M = 16
"""Maximum M, in tokens, of both kernels."""

VECTOR_LENGTHS = (8, 16, 32, 64, 128)
"""Vector lengths, in rows, that decode.cu supports: multiples of 8, because a lane loads 8 rows of a slot at a time."""
TILE_M = (1, 2, 4, 8)
"""Tokens per CTA of decode.cu; more tokens take several CTAs along M."""
PANEL_BYTES = 96 << 10
"""Maximum bytes of a panel of x in decode.cu."""

TENSOR_VECTOR_LENGTHS = (16, 32, 64, 128)
"""Vector lengths, in rows, that decode_tensor.cu supports: multiples of 16, the M dimension of mma.m16n8k16."""
TENSOR_TILE_M = (1, 8, 16)
"""Tokens per CTA of decode_tensor.cu."""
TENSOR_WARPS_STAGES = ((16, 2), (16, 1), (8, 2), (8, 1))
"""(warps per CTA, pipeline stages per warp) of decode_tensor.cu, fastest first."""
TILE_SLOTS = 32
"""Slots per stage of a warp in decode_tensor.cu."""
CHUNK_COLUMNS = 8
"""Columns of x that a thread of decode_tensor.cu copies at a time: 16 bytes of one row, in 16-bit types."""
MAX_FUSED_TILE_M = 8
"""Maximum tokens per CTA of a fused decode_tensor.cu."""
FUSED_ONE_WAVE, FUSED_WAVES = (16, 4, 1), (16, 2, 2)
"""(warps per CTA, stages per warp, CTAs per SM) of a fused decode_tensor.cu for one token: where an SM has at most one
row tile of y, and where it has more. A step of llama2-7b takes 2.108 ms, with `FUSED_WAVES` everywhere 2.248, with 32
warps for one wave 2.112 (H200, results/h200/sweeps/decode-fused.csv)."""
MAX_FAST_PANELS = 3
"""Maximum panels of x at which more warps and stages still win. Fewer warps or stages leave room for larger panels, but
are slower: at M = 8, N x K = 4096 x 11008 (H200) two panels with two stages take 17.1 us, one panel with one stage
18.0."""


def _defines(pattern: VectorNM, dtype: torch.dtype, **tile_macros: int) -> Defines:
    """Return the preprocessor macros that both kernels take, and those of the tile."""
    return {
        "SCALAR": SCALARS[dtype],
        "KEEP": pattern.keep,
        "WINDOW": pattern.window,
        "LENGTH": pattern.length,
        **tile_macros,
    }


@dataclass(frozen=True)
class DecodeSchedule:
    """Compile-time configuration of decode.cu.

    Args:
        pattern: the weight's pattern.
        dtype: of x, the weight's values and y.
        tile_m: tokens per CTA.
        warps: warps per CTA.
        slots_ahead: slots per prefetch buffer of a lane. It has two buffers, so the loads of up to 2 x ``slots_ahead``
            slots are in flight.
    """

    pattern: VectorNM
    dtype: torch.dtype
    tile_m: int
    warps: int
    slots_ahead: int

    @property
    def defines(self) -> Defines:
        """Preprocessor macros, by name."""
        return _defines(self.pattern, self.dtype, TILE_M=self.tile_m, WARPS=self.warps, SLOTS_AHEAD=self.slots_ahead)

    def windows_per_panel(self, k: int) -> int:
        """Return the windows per panel of x, for K = ``k``."""
        fitting = PANEL_BYTES // (self.pattern.window * self.tile_m * self.dtype.itemsize)
        return min(-(-k // self.pattern.window), max(1, fitting))

    def shared_bytes(self, k: int) -> int:
        """Return the bytes of shared memory per CTA, for K = ``k``.

        The warps' partial sums reuse the panel's memory, so it is the larger of the two.
        """
        panel = self.windows_per_panel(k) * self.pattern.window * self.tile_m * self.dtype.itemsize
        partials = 4 * self.warps * self.pattern.length  # float32, one token at a time
        return max(panel, partials)


def choose_decode(pattern: VectorNM, dtype: torch.dtype, m: int, n: int, sms: int) -> DecodeSchedule:
    """Return the schedule of decode.cu for M = ``m`` tokens, N = ``n`` rows and a GPU of ``sms`` SMs.

    Microseconds on an H200 at 16:32v32, M = 1 and N x K = 4096 x 4096 / 11008 x 4096 / 28672 x 8192: 16 warps
    8.0 / 16.2 / 68.9; 8 warps 8.8 / 14.1 / 66.3; 8 warps with ``slots_ahead`` 4 (the others have 2) 8.1 / 14.8 / 68.4.
    """
    tile_m = next((tile for tile in TILE_M if tile >= m), TILE_M[-1])
    if tile_m == TILE_M[-1]:
        return DecodeSchedule(pattern, dtype, tile_m, warps=8, slots_ahead=4)
    one_wave = -(-n // pattern.length) <= sms  # at most one CTA per SM: more warps hide more latency
    return DecodeSchedule(pattern, dtype, tile_m, warps=16 if one_wave else 8, slots_ahead=2)


@dataclass(frozen=True)
class DecodeTensorSchedule:
    """Compile-time configuration of decode_tensor.cu.

    Args:
        pattern: the weight's pattern.
        dtype: of x, the weight's values and y; 16 bits.
        tile_m: tokens per CTA.
        warps: warps per CTA.
        stages: pipeline stages per warp, of `TILE_SLOTS` slots each.
        tiles_at_once: row tiles that a CTA computes at the same time, each with its share of the warps: 2 with SiLU.
        ctas_per_sm: CTAs that the registers must leave room for.
        persistent: whether CTAs stride over the row tiles, as many as are resident. Each then copies x once.
    """

    pattern: VectorNM
    dtype: torch.dtype
    tile_m: int
    warps: int
    stages: int
    tiles_at_once: int = 1
    ctas_per_sm: int = 1
    persistent: bool = True

    @property
    def tile_n(self) -> int:
        """Rows per CTA tile."""
        return min(self.pattern.length, 32)

    @property
    def defines(self) -> Defines:
        """Preprocessor macros, by name."""
        tile_macros = {"TILE_N": self.tile_n, "TILE_M": self.tile_m, "WARPS": self.warps, "STAGES": self.stages}
        return _defines(self.pattern, self.dtype, **tile_macros, CTAS_PER_SM=self.ctas_per_sm)

    def ctas(self, row_tiles: int, sms: int) -> int:
        """Return the CTAs of the grid, for ``row_tiles`` row tiles of y."""
        return min(row_tiles, self.ctas_per_sm * sms) if self.persistent else row_tiles

    def steps(self, slot_tiles: int) -> int:
        """Return a warp's tiles per row tile and panel, rounded up to a multiple of the stages."""
        return -(-slot_tiles // (self.warps // self.tiles_at_once * self.stages)) * self.stages

    def panel_chunks(self, windows: int) -> int:
        """Return the 16-byte chunks, of `CHUNK_COLUMNS` columns each, per row of x in ``windows`` windows."""
        return -(-windows * self.pattern.window // CHUNK_COLUMNS)

    def shared_bytes(self, windows: int) -> int:
        """Return the bytes of shared memory per CTA for a panel of ``windows`` windows.

        The regions are those in the header comment of decode_tensor.cu.
        """
        weights = self.warps * self.stages * TILE_SLOTS * self.tile_n * 2
        bytes_per_column = 2 if self.tile_m == 1 else 16 * -(-self.tile_m // 8)  # 2 bytes per token, padded to 8 tokens
        panel = self.panel_chunks(windows) * CHUNK_COLUMNS * bytes_per_column
        partials = self.warps * self.tile_m * self.tile_n * 4
        exchange = self.warps * TILE_SLOTS * 2 if self.tile_m == 1 else 0  # one value of x per slot of a stage
        return weights + panel + partials + exchange

    def windows_per_panel(self, k: int, shared_limit: int) -> int | None:
        """Return the windows per panel for the fewest panels that fit ``shared_limit``; None if none fits.

        The panels have nearly equal sizes, each a whole number of stages and of 16-byte chunks; the last one may be
        smaller.

        Args:
            k: columns of x.
            shared_limit: bytes of shared memory that a CTA may take, one panel included.
        """
        windows = -(-k // self.pattern.window)
        if self.shared_bytes(windows) <= shared_limit:
            return windows
        # A panel must be whole stages (TILE_SLOTS slots) and whole chunks (CHUNK_COLUMNS columns).
        keep, window = self.pattern.keep, self.pattern.window
        step = lcm(TILE_SLOTS // gcd(keep, TILE_SLOTS), CHUNK_COLUMNS // gcd(window, CHUNK_COLUMNS))
        fitting = [count for count in range(step, windows, step) if self.shared_bytes(count) <= shared_limit]
        if not fitting:
            return None
        panels = -(-windows // fitting[-1])
        return -(-windows // (panels * step)) * step  # at most fitting[-1], which is a multiple of step


@cache
def choose_decode_tensor(
    pattern: VectorNM, dtype: torch.dtype, m: int, k: int, shared_limit: int
) -> DecodeTensorSchedule | None:
    """Return the first schedule of `TENSOR_WARPS_STAGES` that needs at most `MAX_FAST_PANELS` panels of x.

    Args:
        m: tokens, at most `MAX_M`.
        k: columns of x.
        shared_limit: bytes of shared memory that a CTA may take.
    Returns:
        If all schedules need more panels, that with the fewest; None if no panel fits.
    """
    tile_m = next(tile for tile in TENSOR_TILE_M if tile >= m)
    fitting = []
    for warps, stages in TENSOR_WARPS_STAGES:
        # For one token the registers are limited so that two CTAs fit on an SM: under PDL the next kernel's CTAs then
        # start while this kernel's still run. For more a CTA copies x once for all of its row tiles.
        ctas = 2 if tile_m == 1 else 1
        schedule = DecodeTensorSchedule(pattern, dtype, tile_m, warps, stages, 1, ctas, persistent=tile_m > 1)
        windows = schedule.windows_per_panel(k, shared_limit)
        if windows is not None:
            panels = -(-k // (windows * pattern.window))
            # All numbers up to MAX_FAST_PANELS count as equal, and min() returns the first smallest entry.
            fitting.append((max(MAX_FAST_PANELS, panels), schedule))
    return min(fitting, key=lambda entry: entry[0], default=(0, None))[1]


def choose_fused(problem: Problem, gpu: DeviceFacts) -> DecodeTensorSchedule | None:
    """Return the schedule of decode_tensor.cu with a prologue and an epilogue; None if no schedule can fuse them.

    Args:
        problem: the matmul, its prologue and its epilogue.
        gpu: what it runs on.
    """
    pattern, at_once = vectors_of(problem.pattern), 2 if problem.epilogue == "silu_mul" else 1
    tile_m = next(tile for tile in TENSOR_TILE_M if tile >= problem.m)
    tile_n = min(pattern.length, 32)
    if tile_m > MAX_FUSED_TILE_M or problem.k % CHUNK_COLUMNS or (at_once == 2 and problem.n % (2 * tile_n)):
        return None
    one_wave = -(-problem.n // (at_once * tile_n)) <= gpu.sms
    fastest = () if tile_m > 1 else (FUSED_ONE_WAVE,) if one_wave else (FUSED_WAVES,)
    for warps, stages, ctas in (*fastest, *((*config, 1) for config in TENSOR_WARPS_STAGES)):
        schedule = DecodeTensorSchedule(
            pattern, problem.dtype, tile_m, warps, stages, at_once, ctas, persistent=tile_m > 1
        )
        windows = schedule.windows_per_panel(problem.k, gpu.shared_per_cta)
        # A norm needs all of x at once.
        if windows and (problem.prologue == "none" or windows * pattern.window >= problem.k):
            return schedule
    return None

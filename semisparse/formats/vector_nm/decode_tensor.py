"""GPU products of few tokens on tensor cores, straight from the packed bytes."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import gcd, lcm
from pathlib import Path
from typing import NamedTuple

import torch

from semisparse.errors import KernelError
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import decode_refusal, prepare_launch
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.formats.vector_nm.tiled import SCALARS, shared_limit, stored_slots
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

LENGTHS = (16, 32, 64, 128)
"""Rows of a vector: a product of tensor cores takes 16."""

TOKENS = (1, 8, 16)
"""Tokens that a build takes; the smallest that is enough is chosen."""

STRIP_ROWS = 32
TILE_SLOTS = 32
UNIT = 8
"""Columns of x that a thread brings at a time: 16 bytes of a row."""

DIVISIONS = ((16, 2), (16, 1), (8, 2), (8, 1))
"""Warps of a block, and tiles that each has on its way; the first are the fastest where x finds room beside them."""

FEW_PANELS = 3
"""Of x, that cost less than fewer tiles on their way: 17.1 us in two for 18.0 in one (8 tokens, 4096 x 11008, H200)."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Build(NamedTuple):
    """What the kernel is compiled for, see decode_tensor.cu."""

    pattern: VectorNM
    dtype: torch.dtype
    tokens: int
    warps: int
    stages: int

    @property
    def blocks(self) -> int:
        """Of a processor: for one token, so that the next launch finds room beside this one."""
        return 2 if self.tokens == 1 else 1

    @property
    def rows(self) -> int:
        """Of a strip."""
        return min(self.pattern.length, STRIP_ROWS)

    @property
    def defines(self) -> Defines:
        """Macros."""
        return {
            "SCALAR": SCALARS[self.dtype],
            "KEEP": self.pattern.keep,
            "WINDOW": self.pattern.window,
            "LENGTH": self.pattern.length,
            "ROWS": self.rows,
            "TOKENS": self.tokens,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }

    def shared(self, units: int) -> int:
        """Count the bytes of shared memory of a block whose panel of x has so many units."""
        ring = self.warps * self.stages * TILE_SLOTS * self.rows * 2
        of_column = 2 if self.tokens == 1 else 16 * -(-self.tokens // 8)
        sums = self.warps * self.tokens * self.rows * 4
        exchanges = self.warps * TILE_SLOTS * 2 if self.tokens == 1 else 0
        return ring + units * UNIT * of_column + sums + exchanges

    def panel_windows(self, k: int, limit: int) -> int | None:
        """Give the windows of a panel: as few equal ones as ``limit`` bytes hold beside the rest; None if none do."""
        windows = -(-k // self.pattern.window)
        if self.shared(self.units(windows)) <= limit:
            return windows
        # A panel ends with a tile, and the next begins at a multiple of eight columns.
        step = lcm(TILE_SLOTS // gcd(self.pattern.keep, TILE_SLOTS), UNIT // gcd(self.pattern.window, UNIT))
        fitting = [count for count in range(step, windows, step) if self.shared(self.units(count)) <= limit]
        if not fitting:
            return None
        panels = -(-windows // fitting[-1])
        return -(-windows // (panels * step)) * step

    def units(self, windows: int) -> int:
        """Count the units of eight columns of so many windows."""
        return -(-windows * self.pattern.window // UNIT)


def refusal(problem: Problem) -> str | None:
    """Say why `prepare` cannot compute ``problem`` here, or None if it can."""
    reason = decode_refusal(problem, LENGTHS)
    if reason is None and build_for(problem, shared_limit(problem.device)) is None:
        return f"no panel of x for {problem.pattern} fits shared memory"
    return reason


def build_for(problem: Problem, limit: int) -> Build | None:
    """Choose the first build that brings x in few panels of ``limit`` bytes, else in the fewest; None if none fits."""
    tokens = next(count for count in TOKENS if count >= problem.m)
    pattern = vectors_of(problem.pattern)
    builds = [Build(pattern, problem.dtype, tokens, *division) for division in DIVISIONS]
    sizes = [(build.panel_windows(problem.k, limit), build) for build in builds]
    panels = [(-(-problem.k // (windows * pattern.window)), build) for windows, build in sizes if windows]
    return min(panels, key=lambda found: max(found[0], FEW_PANELS), default=(0, None))[1]


def prepare(problem: Problem, early: bool = False) -> Product:
    """Prepare to multiply 1 to 16 tokens.

    Args:
        problem: x and w float16, or both bfloat16; sums are float32.
        early: whether the weight may be read before the kernel before it on the stream has ended (Hopper and later):
            nothing that still runs may be writing it.
    Raises:
        KernelError: no panel of x fits shared memory.
    """
    build = build_for(problem, shared_limit(problem.device))
    if build is None:
        raise KernelError(f"no panel of x for {problem.pattern} fits shared memory")
    return prepare_build(problem, build, early)


def prepare_build(problem: Problem, build: Build, early: bool = False) -> Product:
    """Prepare to multiply with a given build, as `prepare` does."""
    m, n, k, device, facts = problem.m, problem.n, problem.k, problem.device, device_facts(problem.device)
    windows = build.panel_windows(k, shared_limit(device))
    if windows is None:
        raise KernelError(f"no panel of x for {problem.pattern} fits shared memory")
    units, (_, total) = build.units(windows), stored_slots(problem)
    tiles, panel_tiles = -(-total // TILE_SLOTS), -(-windows * build.pattern.keep // TILE_SLOTS)
    rounds = -(-min(tiles, panel_tiles) // (build.warps * build.stages)) * build.stages
    strips = -(-n // build.rows)
    panels, flags = -(-tiles // panel_tiles), (int(k % UNIT == 0), int(early))
    sizes = (m, n, k, total, strips, panel_tiles, units, panels, rounds, *flags)
    # For one token blocks come and go; x in many tokens is brought once for all strips of a block.
    grid = (strips if build.tokens == 1 else min(strips, facts.processors), 1, 1)
    kernel, threads = _kernel(device, build, build.shared(units)), 32 * build.warps
    return prepare_launch(problem, kernel, grid, threads, sizes)


SOURCE = CudaSource(
    Path(__file__).with_name("decode_tensor.cu"),
    tuple(
        Build(VectorNM(*pattern), dtype, tokens, 16, 2).defines
        for pattern, dtype, tokens in (
            ((16, 32, 32), torch.float16, 1),
            ((16, 32, 32), torch.float16, 8),
            ((16, 32, 32), torch.bfloat16, 16),
            ((5, 7, 16), torch.bfloat16, 8),
            ((5, 7, 128), torch.float16, 1),
        )
    ),
)

SOURCES = (SOURCE,)


@lru_cache(maxsize=256)
def _kernel(device: torch.device, build: Build, shared: int) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, device_facts(device).arch, build.defines)
    return CudaKernel(cubin, "semisparse_vector_nm_decode_tensor", (*[_POINTER] * 5, *[_INT] * 11), shared)

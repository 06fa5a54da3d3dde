"""GPU products of few tokens on tensor cores, straight from the packed bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.tiled import SCALARS, aligned, shared_limit
from semisparse.patterns import VectorNM
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import Defines, compile_cubin

MAX_TOKENS = 16
LENGTHS = (16, 32, 64, 128)
"""Rows of a vector: a product of tensor cores takes 16."""

TOKENS = (1, 8, 16)
"""Tokens that a build takes."""

TILE_SLOTS = 32
STRIP_ROWS = 32
UNIT = 8
UNIT_BYTES = 16

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


@dataclass(frozen=True)
class Build:
    """What the kernel is compiled for, see decode_tensor.cu."""

    pattern: VectorNM
    dtype: torch.dtype
    tokens: int
    warps: int
    stages: int
    extra: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int:
        """Of a strip."""
        return dict(self.extra).get("ROWS", min(self.pattern.length, STRIP_ROWS))

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
            "SPLIT": 1,
            **dict(self.extra),
        }

    def shared(self, units: int) -> int:
        """Count the bytes of shared memory of a block whose panel of x has so many units of eight columns."""
        ring = 0 if dict(self.extra).get("REGISTERS") else self.warps * self.stages * TILE_SLOTS * self.rows * 2
        halves = -(-self.tokens // UNIT)
        column = 2 if self.tokens == 1 else UNIT_BYTES
        exchange = self.warps * TILE_SLOTS * 2 if self.tokens == 1 else 0
        return (
            ring
            + halves * (units + 1) * UNIT * column
            + (self.warps + 2 * (self.split - 1)) * self.tokens * self.rows * 4
            + exchange
        )

    @property
    def split(self) -> int:
        return dict(self.extra).get("SPLIT", 1)


def panel_windows(build: Build, k: int, shared: int) -> int | None:
    """Give the most windows of x that ``shared`` bytes hold beside the rest, of whole tiles; None if none do."""
    pattern = build.pattern
    windows = -(-k // pattern.window)
    if build.split == 1 and build.shared(units_of(windows, pattern)) <= shared:
        return windows
    # A panel ends with a tile, and the next begins at a multiple of eight columns.
    step = lcm(TILE_SLOTS // gcd(pattern.keep, TILE_SLOTS), UNIT // gcd(pattern.window, UNIT))
    fitting = [count for count in range(step, windows, step) if build.shared(units_of(count, pattern)) <= shared]
    if build.split > 1:
        share = -(-windows // build.split)
        return min((count for count in fitting if count >= share), default=max(fitting, default=None))
    return max(fitting, default=None)


def units_of(windows: int, pattern: VectorNM) -> int:
    """Count the units of eight columns of so many windows."""
    return -(-windows * pattern.window // UNIT)


def prepare(problem: Problem, build: Build, early: bool = False, blocks_of: int = 1, dependent: bool = True) -> Product:
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    pattern = build.pattern
    windows = panel_windows(build, k, shared_limit(device))
    units, total = units_of(windows, pattern), -(-k // pattern.window) * pattern.keep
    panel_tiles = -(-windows * pattern.keep // TILE_SLOTS)
    tiles = -(-total // TILE_SLOTS)
    panels, rounds = (
        -(-tiles // panel_tiles),
        -(-min(tiles, panel_tiles) // (build.warps * build.stages)) * build.stages,
    )
    strips = -(-n // build.rows)
    facts = device_facts(device)
    kernel = _kernel(device, build, build.shared(units))
    grid = (build.split * min(strips, max(1, blocks_of * facts.processors // build.split)), 1, 1)

    def decode(x: Tensor, packed: Packed, bias: Tensor | None, *stamps: int) -> Tensor:
        x = aligned(x)
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        y = x.new_empty(m, n)
        values, positions = aligned(packed.tensors["values"]), packed.tensors["positions"].contiguous()
        pointers = map(address, (x, values, positions, bias, y))
        sizes = (m, n, k, total, strips, panel_tiles, units, panels, rounds, int(k % UNIT == 0), int(early))
        kernel(device, grid, 32 * build.warps, *pointers, *sizes, *stamps, dependent=dependent)
        return y

    return decode


@lru_cache(maxsize=256)
def _kernel(device: torch.device, build: Build, shared: int) -> CudaKernel:
    path = Path(__file__).with_name("decode_tensor.cu")
    cubin = compile_cubin(path, device_facts(device).arch, build.defines)
    stamps = [_POINTER] if dict(build.extra).get("STAMPS") else []
    return CudaKernel(cubin, "semisparse_vector_nm_decode_tensor", (*[_POINTER] * 5, *[_INT] * 11, *stamps), shared)

"""GPU products on tensor cores from the packed bytes: up to 16 tokens in one pass over the weight."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda import INDICES, RESERVED, refusal, shared_limit
from semisparse.formats.ec_csr.layout import (
    LANES,
    delta_bits_of,
    index_bits_for,
    layout_of,
    panel_rows_of,
)
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

TOKENS = (8, 16)
"""Of a pass that there are builds for."""

SHARES = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 2), (2, 1))
"""Lanes of a block, and blocks that shall fit a processor, the first preferred."""

FEWEST_TOKENS = 9
"""For fewer `decode_banks` is faster."""

WARPS = 16

STRIP = 64
"""Bytes of a row of a tile that a warp multiplies at a time."""

ADD_THREADS = 256

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Build(NamedTuple):
    """What `tiles.cu` is compiled for."""

    dtype: torch.dtype
    tokens: int
    delta_bits: int
    index_bits: int
    panel_rows: int
    group: int
    blocks: int
    warps: int = WARPS

    @property
    def defines(self) -> Defines:
        """Macros."""
        return {
            "SCALAR": SCALARS[self.dtype],
            "TOKENS": self.tokens,
            "DELTA_BITS": self.delta_bits,
            "INDEX": INDICES[self.index_bits],
            "PANEL_ROWS": self.panel_rows,
            "GROUP": self.group,
            "WARPS": self.warps,
            "BLOCKS": self.blocks,
        }

    def stride(self, k: int) -> int:
        """Give the bytes from a row of a tile to the next, an odd number of strips."""
        return STRIP * (-(-(-(-k // LANES) * self.group * 2) // STRIP) | 1)

    def shared_bytes(self, k: int) -> int:
        """Give the dynamic shared memory of a block: the tiles of w and x, then the warps' sums in their place."""
        rows = -(-self.panel_rows // 16) * 16
        return max((rows + self.tokens) * self.stride(k), self.warps * self.tokens * (rows + 4) * 4)


TILES = CudaSource(
    Path(__file__).with_name("tiles.cu"),
    (
        Build(torch.float16, 16, 4, 16, 32, 8, 2).defines,
        Build(torch.bfloat16, 8, 8, 16, 56, 4, 1).defines,
        Build(torch.float16, 16, 8, 32, 64, 2, 1).defines,
    ),
)

SOURCES = (TILES,)


def tiles_refusal(problem: Problem) -> str | None:
    """Say why `prepare_tiles` cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != "banks":
        return f"reads the layout banks, this weight is stored in {layout_of(problem.params)}"
    if not 1 <= problem.m <= TOKENS[-1]:
        return f"takes 1 to {TOKENS[-1]} tokens, got {problem.m}"
    if problem.dtype not in SCALARS:
        return f"x is {problem.dtype}; it takes float16 and bfloat16"
    reason = refusal(problem)
    if reason is None and (needed := build_for(problem).shared_bytes(problem.k)) > shared_limit(problem.device):
        return f"a tile needs {needed} bytes of shared memory, the device has {shared_limit(problem.device)}"
    return reason


def tiles_pay(problem: Problem) -> bool:
    """Say whether `decode_banks` is slower, by what was measured on an H200."""
    return problem.m >= FEWEST_TOKENS


def build_for(problem: Problem) -> Build:
    """Choose the build for a problem; where no tile fits, its shared memory exceeds the device's."""
    k, tokens = problem.k, next(tokens for tokens in TOKENS if problem.m <= tokens)
    params = problem.params
    fixed = (problem.dtype, tokens, delta_bits_of(params), index_bits_for(k), panel_rows_of(params))
    builds = [Build(*fixed, group, blocks if panel_rows_of(params) <= 32 else 1) for group, blocks in SHARES]
    limit = shared_limit(problem.device) + RESERVED
    return next((b for b in builds if b.blocks * (b.shared_bytes(k) + RESERVED) <= limit), builds[-1])


def prepare_tiles(problem: Problem) -> Product:
    """Prepare to multiply 1 to 16 tokens of 16 bits with a weight in the layout ``banks``, in x's dtype."""
    build = build_for(problem)
    m, n, k, device = problem.m, problem.n, problem.k, problem.device
    groups = LANES // build.group
    tiles, add = _kernels(build, device, build.shared_bytes(k))
    grid = (-(-n // build.panel_rows) * groups, 1, 1)
    stride, dependent = build.stride(k), device_facts(device).overlaps_launches

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, y = x.contiguous(), x.new_empty(m, n)
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        parts = torch.empty(groups, m, n, dtype=torch.float32, device=device)
        stored = [packed.tensors[name].contiguous() for name in ("values", "deltas", "bases", "panel_loads")]
        operands = map(address, [x, *stored, parts])
        tiles(device, grid, LANES * build.warps, *operands, m, n, k, stride, dependent=dependent)
        sums = map(address, [parts, bias, y])
        add(device, (-(-n // ADD_THREADS), m, 1), ADD_THREADS, *sums, m, n, dependent=dependent)
        return y

    return multiply


@lru_cache(maxsize=256)
def _kernels(build: Build, device: torch.device, shared: int) -> tuple[CudaKernel, CudaKernel]:
    cubin = compile_cubin(TILES.path, device_facts(device).arch, build.defines)
    tiles = CudaKernel(cubin, "semisparse_ec_csr_tiles", (*[_POINTER] * 6, *[_INT] * 4), shared)
    return tiles, CudaKernel(cubin, "semisparse_ec_csr_add_parts", (*[_POINTER] * 3, *[_INT] * 2))

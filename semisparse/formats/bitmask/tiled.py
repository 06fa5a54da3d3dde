"""GPU kernel for the layout ``tiles``: up to 16 tokens in one pass over the weight's bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Problem
from semisparse.formats.bitmask.layouts import layout_of
from semisparse.formats.bitmask.pack import values_per_block
from semisparse.formats.bitmask.tiles import ROWS
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin, unavailable

MAX_TOKENS = 16

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

OUTPUTS = {**SCALARS, torch.float32: "float"}

_PARAMETERS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 8)


@dataclass(frozen=True)
class Division:
    """How a product is dealt out to warps.

    Args:
        splits: warps that share a tile of rows.
        row_tiles: tiles of rows that a block computes at a time.
        blocks: how many; each walks over the rows.
        panel: column tiles of x that a block holds in shared memory.
    """

    splits: int
    row_tiles: int
    blocks: int
    panel: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.splits * self.row_tiles


def refusal(problem: Problem) -> str | None:
    """Say why `product` cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != "tiles":
        return "reads the layout tiles, this weight is stored in rows"
    if not 1 <= problem.m <= MAX_TOKENS:
        return f"takes 1 to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype != problem.weight_dtype:
        return f"x and w have one dtype, got {problem.dtype} and {problem.weight_dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return unavailable()


def product(x: Tensor, packed: Packed, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply 1 to 16 tokens.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype, layout ``tiles``.
        bias: [N] or None.
        out_dtype: float16, bfloat16 or float32; x's if None.
    Returns:
        [M, N].
    """

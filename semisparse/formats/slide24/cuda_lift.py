"""`quantise_and_lift` and `lift` into tiles, for Hopper: one launch of lift.cu, a thread block a token."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.slide24.layout import TOKEN_BYTES, lifted_columns
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin

ARCHITECTURE = "sm_90a"

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""Of x."""

ROUNDED = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}

KEEPS = (2, 4, 8)
"""Loads of `LOAD` columns that a thread keeps in registers. The most, with so many fewer threads, are fastest where
tokens fill the device all the same: 4096 x 3584 to int8 with 8 and 4 takes 16.7 and 18.3 us, 64 x 3584 with 8, 4 and 2
3.8, 3.0 and 2.6."""

ENOUGH_THREADS = 100_000
"""On the device."""

LOAD = 8

UNIT = 16
"""Bytes that a thread writes at once."""

FEWEST_THREADS, MOST_THREADS, WARP = 64, 640, 32
"""Of a thread block."""

SHARED_LIMIT = 226 << 10
"""Bytes of a lifted row; what the kernel needs beside it are some 128."""

_PARAMETERS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 5, ctypes.c_uint32)


def defines(of_x: torch.dtype, dtype: torch.dtype | None, keep: int) -> dict[str, str | int]:
    """Give the macros of a build."""
    return {"IN": SCALARS[of_x], "ROUNDED": ROUNDED[dtype], "KEEP": keep}


SOURCE = CudaSource(
    Path(__file__).with_name("lift.cu"),
    tuple(defines(of_x, dtype, keep) for of_x in SCALARS for dtype in ROUNDED for keep in KEEPS),
    architectures=(ARCHITECTURE,),
)

SOURCES = (SOURCE,)


@dataclass(frozen=True)
class Row:
    """How a token of K columns is lifted.

    Args:
        blocks: of 128 bytes, when lifted.
        keep: loads that a thread keeps in registers.
        threads: of a thread block.
    """

    blocks: int
    keep: int
    threads: int

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.blocks * TOKEN_BYTES


@lru_cache(maxsize=4096)
def row_of(m: int, k: int, window: int, itemsize: int) -> Row:
    """Say how M tokens of K columns, in groups of ``window``, are lifted to values of ``itemsize`` bytes."""
    blocks = -(-lifted_columns(k, window) * itemsize // TOKEN_BYTES)
    loads = -(-k // LOAD)
    possible = [keep for keep in KEEPS if loads <= keep * MOST_THREADS] or [KEEPS[-1]]
    keep = max((keep for keep in possible if m * loads >= keep * ENOUGH_THREADS), default=possible[0])
    threads = -(-loads // keep // WARP) * WARP
    return Row(blocks, keep, min(MOST_THREADS, max(FEWEST_THREADS, threads)))


def inverse_of(gap: int) -> int:
    """Give 2^32 over the pairs of a group, rounded up: a multiplication takes the place of a division."""
    return -(-(1 << 32) // gap)


def refusal(k: int, window: int, itemsize: int) -> str | None:
    """Say why a token of K columns cannot be lifted, or None if it can."""
    if row_of(1, k, window, itemsize).bytes <= SHARED_LIMIT:
        return None
    return f"a token of {k} columns does not fit shared memory, which has {SHARED_LIMIT} bytes"


Lift = Callable[[Tensor, int, int, int], None]
"""(x [M, K], and the addresses of what it becomes, of scales and of counters) -> None."""


def prepare(
    m: int, k: int, of_x: torch.dtype, dtype: torch.dtype | None, window: int, tokens: int, count: int = 0
) -> tuple[tuple[int, int, int], Lift]:
    """Prepare to round each token at its own scale (algorithm 1), or leave it as it is, and lift it (equation 4).

    Args:
        m, k: of x.
        of_x: float16 or bfloat16; x is on a Hopper GPU.
        dtype: torch.int8, torch.float8_e4m3fn, or None for x as it is.
        window: columns of a group, 2N.
        tokens: rows of the result, at least M; those past M are not written.
        count: of counters, int32, which are set to 0 for the product that follows.
    Returns:
        The shape of what x becomes, [blocks, tokens, 128 bytes] in tiles, as `tiles.py` says; and what launches the
        kernel. Scales are [M] float32, and null for x as it is.
    """
    stored = dtype or of_x
    row = row_of(m, k, window, stored.itemsize)
    kernel, gap = _kernel(of_x, dtype, row.keep, row.bytes), window // 2
    sizes = (k, gap, tokens, row.bytes // UNIT, count, inverse_of(gap))

    def lift(x: Tensor, lifted: int, scales: int, counters: int) -> None:
        x = x.contiguous()
        kernel(x.device, (m, 1, 1), row.threads, x.data_ptr(), lifted, scales, counters, *sizes)

    return (row.blocks, tokens, TOKEN_BYTES // stored.itemsize), lift


@lru_cache(maxsize=4096)
def _kernel(of_x: torch.dtype, dtype: torch.dtype | None, keep: int, shared: int) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, defines(of_x, dtype, keep))
    return CudaKernel(cubin, "semisparse_lift", _PARAMETERS, shared)

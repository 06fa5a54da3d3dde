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

KEEP = 2
"""Loads of `LOAD` columns that a thread keeps in registers. 4096 x 18944 to int8: 99 us; with 4 110, with 8 157."""

LOAD = 8

UNIT = 16
"""Bytes that a thread writes at once."""

FEWEST_THREADS, MANY_THREADS, MOST_THREADS, WARP = 64, 256, 1024, 32

FEW_TOKENS = 256
"""Up to so many, a thread block has as many threads as its token has use for: nothing else hides the latency."""

SHARED_LIMIT = 226 << 10
"""Bytes of a lifted row; what the kernel needs beside it are some 128."""

_PARAMETERS = (*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 5, ctypes.c_uint32)


def defines(of_x: torch.dtype, dtype: torch.dtype | None) -> dict[str, str | int]:
    """Give the macros of a build."""
    return {"IN": SCALARS[of_x], "ROUNDED": ROUNDED[dtype], "KEEP": KEEP}


SOURCE = CudaSource(
    Path(__file__).with_name("lift.cu"),
    tuple(defines(of_x, dtype) for of_x in SCALARS for dtype in ROUNDED),
    architectures=(ARCHITECTURE,),
)

SOURCES = (SOURCE,)


@dataclass(frozen=True)
class Row:
    """How a token of K columns is lifted.

    Args:
        blocks: of 128 bytes, when lifted.
        threads: of a thread block.
    """

    blocks: int
    threads: int

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.blocks * TOKEN_BYTES


@lru_cache(maxsize=4096)
def row_of(m: int, k: int, window: int, itemsize: int) -> Row:
    """Say how M tokens of K columns, in groups of ``window``, are lifted to values of ``itemsize`` bytes."""
    blocks = -(-lifted_columns(k, window) * itemsize // TOKEN_BYTES)
    threads = -(-k // LOAD // KEEP // WARP) * WARP
    most = MOST_THREADS if m <= FEW_TOKENS else MANY_THREADS
    return Row(blocks, min(most, max(FEWEST_THREADS, threads)))


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
    kernel, gap = _kernel(of_x, dtype, row.bytes), window // 2
    sizes = (k, gap, tokens, row.bytes // UNIT, count, inverse_of(gap))

    def lift(x: Tensor, lifted: int, scales: int, counters: int) -> None:
        x = x.contiguous()
        kernel(x.device, (m, 1, 1), row.threads, x.data_ptr(), lifted, scales, counters, *sizes)

    return (row.blocks, tokens, TOKEN_BYTES // stored.itemsize), lift


@lru_cache(maxsize=4096)
def _kernel(of_x: torch.dtype, dtype: torch.dtype | None, shared: int) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, defines(of_x, dtype))
    return CudaKernel(cubin, "semisparse_lift", _PARAMETERS, shared)

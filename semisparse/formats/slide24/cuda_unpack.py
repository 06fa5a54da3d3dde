"""A dense weight from tiles, on Hopper: one launch of unpack.cu."""

from __future__ import annotations

import ctypes
from functools import cache
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.slide24.layout import TOKEN_BYTES
from semisparse.formats.slide24.tiles import ROWS
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin

ARCHITECTURE = "sm_90a"

SOURCE = CudaSource(
    Path(__file__).with_name("unpack.cu"), tuple({"WIDE": wide} for wide in (1, 2)), architectures=(ARCHITECTURE,)
)

SOURCES = (SOURCE,)

THREADS = 256

SHARED_LIMIT = 226 << 10

_PARAMETERS = (*[ctypes.c_void_p] * 2, *[ctypes.c_int] * 7)


def share_of(window: int, itemsize: int) -> tuple[int, int]:
    """Say how many blocks of K' hold whole groups of ``window`` columns, and how many columns those are."""
    windows, of_block = window // 2 - 1, TOKEN_BYTES // itemsize // 4
    blocks = windows // gcd(windows, of_block)
    return blocks, blocks * of_block // windows * window


def shared_bytes(window: int, itemsize: int) -> int:
    """Give the shared memory of a thread block: its columns of 64 rows, 16 bytes apart."""
    return ROWS * (share_of(window, itemsize)[1] * itemsize + 16)


def refusal(window: int, itemsize: int) -> str | None:
    """Say why a weight in groups of ``window`` cannot be unpacked, or None if it can."""
    if shared_bytes(window, itemsize) <= SHARED_LIMIT:
        return None
    return f"groups of {window} columns do not fit shared memory"


def unpack(tiles: Tensor, n: int, k: int, window: int, dtype: torch.dtype) -> Tensor:
    """Give a weight back as it is stored, unscaled.

    Args:
        tiles: [blocks, tiles, bytes] uint8, on a Hopper GPU.
        n, k: of the weight.
        window: columns of a group, 2N.
        dtype: of the stored values.
    Returns:
        [N, K] in ``dtype``.
    """
    blocks, count, _ = tiles.shape
    together, columns = share_of(window, dtype.itemsize)
    dense = tiles.new_empty((n, k), dtype=dtype)
    kernel = _kernel(dtype.itemsize, shared_bytes(window, dtype.itemsize))
    sizes = (n, k, blocks, count, together, columns, window // 2)
    grid = (-(-blocks // together), -(-n // ROWS), 1)
    kernel(tiles.device, grid, THREADS, tiles.data_ptr(), dense.data_ptr(), *sizes)
    return dense


@cache
def _kernel(itemsize: int, shared: int) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, {"WIDE": itemsize})
    return CudaKernel(cubin, "semisparse_unpack", _PARAMETERS, shared)

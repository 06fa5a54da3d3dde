"""pack_tiles.cu: mask tiles from a dense weight on a GPU, where storage/tiles.py would take milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisparse.formats.ec_csr.storage.tiles import DTYPES, LANES, LIMITS, MASK_UNITS, tile_shape
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal

SOURCE = CudaSource(Path(__file__).with_name("pack_tiles.cu"))

WARPS, CTAS_PER_SM = 8, 4

VECTOR = 8
"""Values that a lane loads at a time."""


def refusal(weight: Tensor) -> str | None:
    """Say why the kernel cannot pack ``weight``, or None if it can."""
    if weight.dtype not in DTYPES:
        return f"packs float16 and bfloat16, got {weight.dtype}"
    if weight.stride(1) != 1 or weight.stride(0) % VECTOR or weight.data_ptr() % 16:
        return "loads 16 bytes at a time: rows must begin at multiples of them"
    if weight.stride(0) != weight.shape[1] and weight.stride(0) // 32 != -(-weight.shape[1] // 32):
        return f"rows of {weight.shape[1]} columns are {weight.stride(0)} apart, expected zeros up to a multiple of 32"
    return cuda_refusal(weight.device)


def pack(weight: Tensor) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return what `storage.tiles.pack` returns, for a weight [N, K] that is not refused."""
    (n, k), device = weight.shape, weight.device
    row_tiles, column_tiles = tile_shape(n, k)
    count = row_tiles * column_tiles
    kernel = SOURCE.build("semisparse_ec_csr_pack_tiles").load(device)
    grid = (min(-(-count // WARPS), CTAS_PER_SM * device_facts(device).sms), 1, 1)
    sizes: dict[str, Any] = {"n": n, "pitch": weight.stride(0), "column_tiles": column_tiles, "tile_count": count}
    words = torch.empty(count, dtype=torch.int32, device=device)
    kernel(grid, WARPS * LANES, weight=weight, starts=None, words=words, tiles=None, **sizes)
    starts = torch.zeros(count + 1, dtype=torch.int32, device=device)
    starts[1:] = (words + MASK_UNITS).cumsum(0)
    units, most = torch.stack((starts[-1], words.max())).tolist()
    tiles = torch.zeros(units, LANES, dtype=torch.int32, device=device)
    kernel(grid, WARPS * LANES, weight=weight, starts=starts, words=words, tiles=tiles, **sizes)
    params = {"units": units, "words_limit": next(limit for limit in LIMITS if limit > most)}
    return params, {"tiles": tiles, "tile_starts": starts}

"""Products by Hopper's sparse tensor cores, scales, bias and all in one launch (sparse.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.slide24.layout import TOKEN_BYTES
from semisparse.formats.slide24.tiles import tile_bytes
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin

SHARED_BYTES = 226 << 10
"""Dynamic shared memory of a block, less the barriers."""

THREADS = 128
"""Of a warp group."""

KINDS = {torch.int8: "INT8", torch.float8_e4m3fn: "FP8", torch.bfloat16: "BF16", torch.float16: "FP16"}

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@dataclass(frozen=True)
class Tiling:
    """How y is divided: ``tokens`` and 64 * ``groups`` rows a block, ``cluster`` blocks sharing their tokens."""

    tokens: int
    groups: int
    cluster: int

    def stage_bytes(self, itemsize: int) -> int:
        """Give the shared memory of a stage of the pipeline."""
        return self.tokens * TOKEN_BYTES + self.groups * tile_bytes(itemsize)

    def stages(self, itemsize: int) -> int:
        """Count the stages that shared memory has room for."""
        return SHARED_BYTES // self.stage_bytes(itemsize)


def defines(tiling: Tiling, dtype: torch.dtype, out: torch.dtype) -> dict[str, str | int]:
    """Give the macros of a build."""
    return {
        KINDS[dtype]: 1,
        "OUT": SCALARS[out],
        "TOKENS": tiling.tokens,
        "GROUPS": tiling.groups,
        "CLUSTER": tiling.cluster,
        "STAGES": tiling.stages(dtype.itemsize),
    }


TILINGS = (Tiling(256, 2, 2), Tiling(64, 2, 1))

SOURCE = CudaSource(
    Path(__file__).with_name("sparse.cu"),
    tuple(
        defines(tiling, dtype, out)
        for tiling in TILINGS
        for dtype in KINDS
        for out in SCALARS
        if dtype.itemsize == 1 or dtype == out
    ),
)

SOURCES = (SOURCE,)

_POINTER = ctypes.c_void_p
_PARAMETERS = (*[_POINTER] * 6, *[ctypes.c_int] * 4)


def multiply(
    x: Tensor,
    tiles: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    m: int,
    n: int,
    out: torch.dtype,
    tiling: Tiling,
) -> Tensor:
    """Compute ``x @ w.T``, scaled, with the bias.

    Args:
        x: lifted, in tiles [blocks, tokens, 128 bytes], tokens a multiple of the tiling's.
        tiles: of a weight in x's dtype, [blocks, tiles, bytes].
        scales: of the tokens [M] and of the rows [N], float32; None for a weight as it is.
        bias: [N] in ``out``, or None.
        m: tokens.
        n: rows of the weight.
        out: float16 or bfloat16.
        tiling: how to divide y.
    Returns:
        [M, N].
    """
    y = torch.empty((m, n), dtype=out, device=x.device)
    blocks, count, _ = tiles.shape
    clusters = -(-m // tiling.tokens) * -(-count // (tiling.groups * tiling.cluster))
    resident = device_facts(x.device).processors // tiling.cluster
    if tiling.cluster > 2:  # clusters of four leave some processors of each cluster of processors out
        resident -= 1
    grid = (min(clusters, resident) * tiling.cluster, 1, 1)
    token_scales, row_scales = scales or (None, None)
    pointers = [None if t is None else t.data_ptr() for t in (tiles, x, token_scales, row_scales, bias, y)]
    kernel = _kernel(x.device, x.dtype, out, tiling)
    kernel(x.device, grid, THREADS * (tiling.groups + 1), *pointers, m, n, blocks, count)
    return y


@cache
def _kernel(device: torch.device, dtype: torch.dtype, out: torch.dtype, tiling: Tiling) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, device_facts(device).arch, defines(tiling, dtype, out))
    shared = tiling.stages(dtype.itemsize) * tiling.stage_bytes(dtype.itemsize)
    return CudaKernel(cubin, "semisparse_slide24_sparse", _PARAMETERS, shared)

"""A weight in the layout ``banks`` given back on a GPU, and the product that cuBLAS makes of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Params
from semisparse.formats.ec_csr.cuda import Items, index_of, refusal
from semisparse.formats.ec_csr.layout import LANES, delta_bits_of, layout_of, panel_rows_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.blas import multiply_dense
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

BITS = {2: "unsigned short", 4: "unsigned int"}

WARPS = 16
"""Of a block."""

BLOCKS = 2
"""That shall fit a processor."""

PARTS = 4
"""That a segment is cut into, for a warp each."""

TILE_BYTES = 112 << 10
"""Of the dense weight that a block makes."""

MOST_COLUMNS = 1 << 23
"""Above, 32 bits do not count the bytes of a panel."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def _defines(dtype: torch.dtype, params: Params) -> Defines:
    return {
        "SCALAR": BITS[dtype.itemsize],
        "DELTA_BITS": delta_bits_of(params),
        "INDEX": index_of(params),
        "PANEL_ROWS": panel_rows_of(params),
        "PARTS": PARTS,
        "WARPS": WARPS,
        "BLOCKS": BLOCKS,
    }


UNPACK = CudaSource(
    Path(__file__).with_name("unpack.cu"),
    (
        _defines(torch.float16, {"delta_bits": 4, "k": 4096, "panel_rows": 32}),
        _defines(torch.float32, {"delta_bits": 8, "k": 1 << 20, "panel_rows": 64}),
        _defines(torch.bfloat16, {"delta_bits": 8, "k": 4096, "panel_rows": 64}),
        _defines(torch.float32, {"delta_bits": 4, "k": 4096, "panel_rows": 32}),
    ),
)

SOURCES = (UNPACK,)


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `prepare_unpack_and_multiply` cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != "banks":
        return f"reads the layout banks, this weight is stored in {layout_of(problem.params)}"
    if problem.k > MOST_COLUMNS:
        return f"takes up to {MOST_COLUMNS} columns, got {problem.k}"
    return refusal(problem)


def prepare_unpack(problem: Problem) -> Callable[[Packed], Tensor]:
    """Prepare to give a weight in the layout ``banks`` back: [N, K], rows a multiple of 32 apart in memory."""
    n, k, device, dtype = problem.n, problem.k, problem.device, problem.weight_dtype
    rows, height = panel_rows_of(problem.params), -(-k // LANES)
    place_bytes = LANES * dtype.itemsize
    tiles = -(-rows * height * place_bytes // TILE_BYTES)
    places = -(-rows * height // tiles)
    kernel = _kernel(tuple(problem.params.items()), dtype, device, places * place_bytes + LANES * 4)
    grid, sizes = (-(-n // rows) * tiles, 1, 1), (n, height, tiles, places)
    dependent = device_facts(device).overlaps_launches

    def unpack(packed: Packed) -> Tensor:
        stored = [packed.tensors[name].contiguous() for name in ("values", "deltas", "bases", "panel_loads")]
        weight = stored[0].new_empty(n, height * LANES)
        kernel(device, grid, LANES * WARPS, *map(address, [*stored, weight]), *sizes, dependent=dependent)
        return weight[:, :k]

    return unpack


def prepare_unpack_and_multiply(problem: Problem) -> Product:
    """Prepare to unpack the whole weight and let cuBLAS multiply: x float16, bfloat16 or float32, as w is."""
    unpack = prepare_unpack(problem)
    return lambda x, packed, bias: multiply_dense(x, unpack(packed), bias)


@lru_cache(maxsize=1024)
def _kernel(params: Items, dtype: torch.dtype, device: torch.device, shared: int) -> CudaKernel:
    cubin = compile_cubin(UNPACK.path, device_facts(device).arch, _defines(dtype, dict(params)))
    return CudaKernel(cubin, "semisparse_ec_csr_unpack", (*[_POINTER] * 5, *[_INT] * 4), shared)

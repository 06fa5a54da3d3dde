"""Products for many tokens on Hopper's 2:4 sparse tensor cores, by a weight's plan (plan.py)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem
from semisparse.formats.vector_nm.layout import TILE_ROWS, vectors_of
from semisparse.formats.vector_nm.tiled import SCALARS, aligned, by_column, machine_refusal
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel, address
from semisparse.runtime.nvrtc import CudaSource, Defines, compile_cubin

ARCHITECTURE = "sm_90a"
"""wgmma is Hopper's alone."""

FEWEST_TOKENS = 1024
"""From which on the product beats unpacking for cuBLAS.

At 8:32v32 and 4:32v32 by 1.08 to 1.24 and 1.48 to 1.69 times with 2,048 and 4,096 tokens (H200, three shapes); with 512
tokens and 4,096 rows only half of the processors have a tile.
"""

TOKENS = 128
THREADS = 384
STAGES = 12
STAGE_BYTES = (16 << 10) + 64 + 16
"""Columns of x and weights, the record of a block, two barriers."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


def defines(length: int, dtype: torch.dtype) -> Defines:
    """Give what fours.cu is compiled for."""
    return {"SCALAR": SCALARS[dtype], "LENGTH": length, "STAGES": STAGES}


SOURCE = CudaSource(
    Path(__file__).with_name("fours.cu"),
    tuple(
        defines(length, dtype) for length, dtype in ((32, torch.float16), (32, torch.bfloat16), (128, torch.float16))
    ),
    architectures=(ARCHITECTURE,),
)

SOURCES = (SOURCE,)


def refusal(problem: Problem) -> str | None:
    """Say why `multiply` cannot compute ``problem`` here, or None if it can."""
    if problem.m < 1:
        return "takes 1 token or more, got none"
    if "blocks" not in problem.params:
        return "takes weights with a plan: 16 bits, densities up to 0.3, vectors of 32, 64 or 128 rows, on a Hopper GPU"
    if torch.cuda.get_device_capability(problem.device)[0] != 9:
        return "is for Hopper (compute capability 9.0)"
    return machine_refusal(problem)


def pays(problem: Problem) -> bool:
    """Whether the product is faster than a dense one after unpacking."""
    return problem.m >= FEWEST_TOKENS


def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply by a weight with a plan.

    Args:
        x: [M, K] float16 or bfloat16.
        packed: in x's dtype, with a plan.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype, accumulated in float32.
    """
    x = aligned(x)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    (m, k), n, pattern = x.shape, packed.shape[0], vectors_of(packed.pattern)
    pitch = -(-m // TOKENS) * TOKENS
    columns = by_column(x, -(-k // pattern.window) * pattern.window, pitch, pattern)
    values = aligned(packed.tensors["values"])
    groups, total, length = values.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    plan = (aligned(packed.tensors[name]) for name in ("starts", "columns", "slots", "records"))
    pointers = map(address, (columns, values, *plan, bias, y))
    row_tiles = -(-n // TILE_ROWS)
    tiles = row_tiles * (pitch // TOKENS)
    grid = (min(tiles, device_facts(x.device).processors), 1, 1)
    sizes = (m, n, pitch, groups, total, row_tiles)
    _kernel(x.device, length, x.dtype)(x.device, grid, THREADS, *pointers, *sizes)
    return y


@cache
def _kernel(device: torch.device, length: int, dtype: torch.dtype) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, defines(length, dtype))
    parameters = (*[_POINTER] * 8, *[_INT] * 6)
    return CudaKernel(cubin, "semisparse_vector_nm_fours", parameters, STAGES * STAGE_BYTES)

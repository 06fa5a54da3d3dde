"""Products for many tokens on Hopper's 2:4 sparse tensor cores, by a weight's plan (plan.py)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.layout import TILE_ROWS, vectors_of
from semisparse.formats.vector_nm.tiled import SCALARS, aligned, machine_refusal, prepare_by_column, stored_slots
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
    """Say why `prepare` cannot compute ``problem`` here, or None if it can."""
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


def prepare(problem: Problem) -> Product:
    """Prepare to multiply by a weight with a plan; x and w float16 or bfloat16, sums float32."""
    m, n, device = problem.m, problem.n, problem.device
    pitch = -(-m // TOKENS) * TOKENS
    by_column = prepare_by_column(problem, pitch)
    kernel = _kernel(device, vectors_of(problem.pattern).length, problem.dtype)
    row_tiles = -(-n // TILE_ROWS)
    grid = (min(row_tiles * (pitch // TOKENS), device_facts(device).processors), 1, 1)
    sizes = (m, n, pitch, *stored_slots(problem), row_tiles)

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        columns = by_column(aligned(x))
        stored = [aligned(packed.tensors[name]) for name in ("values", "starts", "columns", "slots", "records")]
        y = x.new_empty(m, n)
        kernel(device, grid, THREADS, *map(address, (columns, *stored, bias, y)), *sizes)
        return y

    return multiply


@cache
def _kernel(device: torch.device, length: int, dtype: torch.dtype) -> CudaKernel:
    cubin = compile_cubin(SOURCE.path, ARCHITECTURE, defines(length, dtype))
    parameters = (*[_POINTER] * 8, *[_INT] * 6)
    return CudaKernel(cubin, "semisparse_vector_nm_fours", parameters, STAGES * STAGE_BYTES)

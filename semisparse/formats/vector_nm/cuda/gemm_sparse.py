"""Kernel `gemm_sparse`: 16-bit GEMM on Hopper's 2:4 sparse tensor cores, for weights in the layout ``sparse_mma``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import transpose
from semisparse.formats.vector_nm.cuda.operands import operands_refusal
from semisparse.formats.vector_nm.cuda.schedule import (
    SCALARS,
    SPARSE_MIN_M,
    SPARSE_STAGE_BYTES,
    SPARSE_STAGES,
    SPARSE_THREADS,
    SPARSE_TILE_M,
    SPARSE_TILE_N,
)
from semisparse.formats.vector_nm.storage import gpu
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned, bias_as


def defines(length: int, dtype: torch.dtype) -> Defines:
    """Return the macros of gemm_sparse.cu."""
    return {"SCALAR": SCALARS[dtype], "LENGTH": length, "STAGES": SPARSE_STAGES}


SOURCE = CudaSource(
    Path(__file__).with_name("gemm_sparse.cu"),
    (defines(32, torch.float16), defines(32, torch.bfloat16), defines(128, torch.float16)),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem``; None if it can."""
    if gpu.layout_of(problem.spec) != gpu.SPARSE_MMA:
        return "needs a column order: 16 bits, densities up to 0.3, vectors of 32, 64 or 128 rows, on a Hopper GPU"
    return operands_refusal(problem) or hopper_refusal(problem.device)


def pays(problem: Problem) -> bool:
    """Return whether M is so large that the kernel is faster than unpacking the weight for cuBLAS."""
    return problem.m >= SPARSE_MIN_M


def prepare(problem: Problem) -> Product:
    """Return the matmul for ``problem``: x, w and y all float16 or all bfloat16; accumulators are float32."""
    n, sms = problem.n, device_facts(problem.device).sms
    x_transposed = transpose.prepare(problem, SPARSE_TILE_M)
    macros = defines(vectors_of(problem.pattern).length, problem.dtype)
    build = SOURCE.build("semisparse_vector_nm_gemm_sparse", macros, SPARSE_STAGES * SPARSE_STAGE_BYTES)
    kernel, row_tiles = build.load(problem.device), -(-n // SPARSE_TILE_N)
    groups, slots = groups_and_slots(problem.spec)
    sizes = {"n": n, "groups": groups, "slots_per_group": slots, "row_tiles": row_tiles}

    def multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        x, bias = aligned(x), bias_as(bias, x.dtype)
        x_t = x_transposed(x)
        names = ("values", "block_starts", "columns", "slots", "metadata")
        tensors = {name: aligned(packed.tensors[name]) for name in names}
        m, pitch = x.shape[0], x_t.shape[1]
        y = x.new_empty(m, n)
        grid = (min(row_tiles * (pitch // SPARSE_TILE_M), sms), 1, 1)
        kernel(grid, SPARSE_THREADS, pdl=False, x_t=x_t, **tensors, bias=bias, y=y, m=m, pitch=pitch, **sizes)
        return y

    return multiply

"""The kernel `gemm`, for any number of tokens: straight from the packed groups of 8 to 128 in 8 to 2 bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import quantise_x
from semisparse.formats.gqs.cuda.gemm_schedule import GemmSchedule, choose_gemm, shape_refusal
from semisparse.formats.gqs.cuda.schedule import ELEMENTS
from semisparse.formats.gqs.storage.disk import TENSORS, code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource, cuda_refusal
from semisparse.runtime.operands import aligned, bias_as

ADD_THREADS = 128
"""Threads per CTA of `add_partials.cu`, each with four rows of w."""

MAX_GRID_Y = 65_535
"""CUDA's limit on CTAs along y."""

HALF, BFLOAT = torch.float16, torch.bfloat16

# The variants are the extremes of what is compiled.
SOURCE = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (
        # tile_m, warps_n, warps_k, row_tiles, k_tile, prefetch, stages, ctas_per_sm, split_k
        GemmSchedule(64, 4, 2, 2, 32, 2, 3, 1, 1).defines(HALF, 4, 16, True),
        GemmSchedule(8, 1, 4, 2, 32, 2, 3, 3, 1).defines(BFLOAT, 8, 128, True),
        GemmSchedule(8, 1, 4, 1, 32, 2, 3, 3, 1).defines(HALF, 3, 8, False),
        GemmSchedule(16, 1, 4, 2, 32, 2, 3, 3, 1).defines(BFLOAT, 4, 128, False),
        GemmSchedule(24, 2, 2, 2, 32, 2, 3, 3, 1).defines(HALF, 8, 32, True),
        GemmSchedule(32, 4, 1, 2, 32, 2, 3, 3, 1).defines(BFLOAT, 8, 16, True),
        GemmSchedule(32, 2, 2, 2, 32, 2, 3, 3, 1).defines(HALF, 3, 128, False),
        GemmSchedule(96, 8, 1, 2, 32, 2, 3, 1, 1).defines(BFLOAT, 8, 128, False),
        GemmSchedule(96, 4, 2, 2, 32, 2, 2, 1, 1).defines(HALF, 3, 8, True),
        GemmSchedule(96, 4, 1, 2, 32, 2, 3, 2, 1).defines(HALF, 2, 64, True),
    ),
)

ADD_PARTIALS = CudaSource(
    Path(__file__).with_name("add_partials.cu"), tuple({"SCALAR": name} for name in ELEMENTS.values())
)


def refusal(problem: Problem) -> str | None:
    """Return why `prepare` cannot compute ``problem`` here, or None if it can."""
    return shape_refusal(problem) or cuda_refusal(problem.device)


def prepare(problem: Problem, schedule: GemmSchedule | None = None) -> Product:
    """Return the matmul: choose its schedule, compile and load its kernels.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes, stages and split-K; None for that of `choose_gemm`.
    Returns:
        A function that accumulates in float32.
    """
    n, k, device, dtype = problem.n, problem.k, problem.device, problem.dtype
    facts, size = device_facts(device), group_size(problem.pattern)
    bits = code_bits(problem.params, size)
    schedule = schedule or choose_gemm(problem.m, n, k, bits, size, facts)
    defines = schedule.defines(dtype, bits, size, k % 8 == 0)
    kernel = SOURCE.build("semisparse_gqs_gemm", defines, schedule.shared_bytes).load(device)
    splits, k_tiles = schedule.split_k, schedule.k_tiles(k, size)
    add = ADD_PARTIALS.build("semisparse_gqs_add_partials", {"SCALAR": ELEMENTS[dtype]}).load(device)
    quantise = quantise_x.prepare(device, dtype) if quantises_x(problem.params) else None
    row_tiles, chunks = -(-n // CHUNK_ROWS), -(-k // (CHUNK_GROUPS * size))
    row_ctas = schedule.row_ctas(n)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        m, m_tiles = x.shape[0], -(-x.shape[0] // schedule.tile_m)
        x = aligned(x if quantise is None else quantise(x))
        bias = bias_as(bias, dtype)
        y = x.new_empty(m, n)
        partials = x.new_empty(splits, m, CHUNK_ROWS * row_tiles, dtype=torch.float32) if splits > 1 else None
        kernel(
            (m_tiles * row_ctas * splits, 1, 1),
            schedule.threads,
            pdl=facts.has_pdl,
            x=x,
            **{name: aligned(packed.tensors[name]) for name in TENSORS},
            bias=bias,
            y=y,
            partials=partials,
            m=m,
            n=n,
            k=k,
            row_tiles=row_tiles,
            chunks=chunks,
            m_tiles=m_tiles,
            row_ctas=row_ctas,
            splits=splits,
            k_tiles=k_tiles,
        )
        if partials is not None:
            add(
                (-(-n // (4 * ADD_THREADS)), min(m, MAX_GRID_Y), 1),
                ADD_THREADS,
                pdl=facts.has_pdl,
                partials=partials,
                bias=bias,
                y=y,
                m=m,
                n=n,
                pitch=CHUNK_ROWS * row_tiles,
                splits=splits,
            )
        return y

    return matmul

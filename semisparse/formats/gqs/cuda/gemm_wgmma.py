"""The kernel `gemm_wgmma`, for any number of tokens on Hopper: expands groups into the registers that wgmma reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.gqs.cuda import quantise_x
from semisparse.formats.gqs.cuda.gemm_schedule import shape_refusal
from semisparse.formats.gqs.cuda.wgmma_schedule import RATES, tiles_of
from semisparse.formats.gqs.storage.disk import TENSORS, code_bits, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import PermutingProduct, Problem, Product
from semisparse.runtime import expand_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import PermutedX
from semisparse.runtime.gemm_schedule import MAX_TOKENS, Schedule, choose
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned


def gemm_defines(dtype: torch.dtype, bits: int, size: int, schedule: Schedule, full: bool = False) -> Defines:
    """Return the macros of `gemm_wgmma.cu`.

    Args:
        dtype: dtype of x and w, float16 or bfloat16.
        bits: bits per code.
        size: columns per group.
        schedule: tile sizes, stages and split-K.
        full: whether no group is dropped and N is a multiple of 16.
    """
    return {"BITS": bits, "GROUP_SIZE": size, **schedule.defines(dtype), **({"FULL": 1} if full else {})}


HALF, BFLOAT = torch.float16, torch.bfloat16

SPILLS_IF_FULL = (64, 2, 2)
"""tile_m, warpgroups and CTAs per SM with which the build that reads no masks would spill 4 to 16 bytes per thread."""

SOURCE = CudaSource(
    Path(__file__).with_name("gemm_wgmma.cu"),
    (
        # tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
        gemm_defines(HALF, 4, 16, Schedule(64, 4, 1, 0, 3, 2, 1)),
        gemm_defines(BFLOAT, 8, 128, Schedule(256, 2, 2, 0, 2, 1, 1)),
        gemm_defines(BFLOAT, 4, 128, Schedule(128, 3, 1, 0, 3, 1, 1)),
        gemm_defines(HALF, 3, 8, Schedule(32, 1, 1, 4, 3, 1, 3)),
        gemm_defines(BFLOAT, 4, 16, Schedule(32, 1, 1, 2, 3, 1, 3, split_in_cluster=True)),
        gemm_defines(HALF, 2, 64, Schedule(16, 4, 1, 2, 4, 1, 1)),
        gemm_defines(HALF, 4, 128, Schedule(64, 3, 1, 0, 3, 2, 1), full=True),
        gemm_defines(BFLOAT, 8, 16, Schedule(64, 1, 1, 4, 2, 1, 3), full=True),
        gemm_defines(BFLOAT, 3, 16, Schedule(256, 2, 2, 0, 2, 1, 1), full=True),
        {**gemm_defines(BFLOAT, 4, 16, Schedule(160, 2, 2, 0, 3, 1, 1)), "EXPERTS": 1},
        {**gemm_defines(HALF, 4, 16, Schedule(16, 3, 2, 0, 4, 2, 1)), "EXPERTS": 1},
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return shape_refusal(problem) or hopper_refusal(problem.device)


def prepare(problem: Problem, schedule: Schedule | None = None) -> Product:
    """Return the matmul: choose its schedule, compile and load its kernels.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes, stages and split-K; None for that of `gemm_schedule.choose`.
    Returns:
        A function that accumulates in float32.
    """
    (n, k), device, dtype = problem.spec.shape, problem.device, problem.dtype
    size = group_size(problem.pattern)
    bits = code_bits(problem.params, size)
    full, facts = bool(problem.params.get("full")) and n % CHUNK_ROWS == 0, device_facts(device)
    tiles = tiles_of(n, k, bits, size, full)
    schedule = schedule or choose(problem.m, tiles, facts, RATES, problem.constant)
    if full and (schedule.tile_m, schedule.warpgroups, schedule.ctas_per_sm) == SPILLS_IF_FULL:
        full, tiles = False, tiles_of(n, k, bits, size)
        schedule = choose(problem.m, tiles, facts, RATES, problem.constant)
    product = expand_gemm.prepare(
        lambda chosen: SOURCE.build(
            "semisparse_gqs_gemm_wgmma", gemm_defines(dtype, bits, size, chosen, full), chosen.shared(tiles)
        ),
        schedule, tiles, size, (n, k), device,
    )  # fmt: skip
    groups = -(-k // size)
    chunks = -(-groups // CHUNK_GROUPS)

    def matmul(x: Tensor | PermutedX, packed: Packed, bias: Tensor | None) -> Tensor:
        tensors = {name: aligned(packed.tensors[name]) for name in TENSORS}
        return product(x, {**tensors, "chunks": chunks, "groups": groups}, bias)

    if quantises_x(problem.params):
        quantise = quantise_x.prepare(device, dtype)
        return lambda x, packed, bias: matmul(quantise(x), packed, bias)
    return PermutingProduct(matmul, product)

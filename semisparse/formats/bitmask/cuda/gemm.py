"""gemm.cu: y for any number of tokens, expanding the tiles into the registers that wgmma reads, on Hopper."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.cuda import operands
from semisparse.formats.bitmask.cuda.schedule import GEMM_RATES, gemm_tiles
from semisparse.formats.bitmask.storage.disk import BLOCK
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.kernel import PermutingProduct, Problem
from semisparse.runtime import expand_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import PermutedX
from semisparse.runtime.gemm_schedule import MAX_TOKENS, Schedule, choose
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines


def gemm_defines(dtype: torch.dtype, keep: int, schedule: Schedule, bits: int = 0) -> Defines:
    """Return the macros of gemm.cu; ``bits`` is 0 for values."""
    return {"KEEP": keep, "BITS": bits, **schedule.defines(dtype)}


GEMM = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (
        # tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
        gemm_defines(torch.float16, 32, Schedule(64, 2, 2, 0, 3, 2, 1)),
        gemm_defines(torch.float16, 64, Schedule(256, 2, 2, 0, 1, 1, 1)),
        gemm_defines(torch.bfloat16, 31, Schedule(32, 1, 1, 4, 3, 1, 3)),
        gemm_defines(torch.bfloat16, 32, Schedule(192, 2, 1, 4, 3, 1, 1)),
        gemm_defines(torch.bfloat16, 32, Schedule(128, 3, 1, 2, 2, 1, 1, split_in_cluster=True)),
        {**gemm_defines(torch.bfloat16, 32, Schedule(192, 2, 1, 0, 3, 1, 1)), "EXPERTS": 1},
        {**gemm_defines(torch.float16, 31, Schedule(16, 2, 2, 0, 3, 2, 1)), "EXPERTS": 1},
        gemm_defines(torch.float16, 32, Schedule(64, 2, 2, 0, 3, 2, 1), 8),
        gemm_defines(torch.bfloat16, 32, Schedule(256, 2, 2, 0, 3, 1, 1), 4),
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return operands.refusal(problem) or hopper_refusal(problem.device)


def prepare(problem: Problem, schedule: Schedule | None = None) -> PermutingProduct:
    """Compile and load gemm.cu and permute_x.cu for one problem.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes, stages and split-K; None for the one that should be fastest.
    Returns:
        The matmul, accumulated in float32.
    """
    weight = tiling(problem.spec)
    tiles = gemm_tiles(weight)
    rates, facts = GEMM_RATES[weight.bits], device_facts(problem.device)
    schedule = schedule or choose(problem.m, tiles, facts, rates, problem.constant)
    product = expand_gemm.prepare(
        lambda chosen: GEMM.build(
            "semisparse_bitmask_gemm",
            gemm_defines(problem.dtype, weight.keep, chosen, weight.bits),
            chosen.shared(tiles),
        ),
        schedule, tiles, BLOCK, problem.spec.shape, problem.device,
    )  # fmt: skip

    def gemm(x: Tensor | PermutedX, packed: Packed, bias: Tensor | None) -> Tensor:
        return product(x, {"tiles": packed.tensors["tiles"]}, bias)

    return PermutingProduct(gemm, product)

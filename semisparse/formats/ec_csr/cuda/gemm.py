"""gemm.cu: y for any number of tokens from mask tiles, expanded into the registers that wgmma reads, on Hopper."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.ec_csr.cuda.decode_tiles import tiles_refusal
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.ec_csr.storage.tiles import BLOCK, tiles_of
from semisparse.formats.kernel import PermutingProduct, Problem
from semisparse.runtime import expand_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import PermutedX
from semisparse.runtime.gemm_schedule import MAX_TOKENS, Rates, Schedule, choose
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines

RATES = Rates(expand_us=0.204, overlap=2.4)
"""Those of bitmask's values, which are expanded alike."""

PAYS_MAX_TOKENS = 2048
"""M above which `unpack_tiles` is preferred. A prompt through 8 blocks took `gemm` 1.02 times dense's time for 2,048
tokens, 1.09 for 4,096 and 1.08 for 8,192 (results/h200/blocks-ec_csr.csv)."""


def gemm_defines(dtype: torch.dtype, words: int, schedule: Schedule) -> Defines:
    """Return the macros of gemm.cu."""
    return {"WORDS": words, **schedule.defines(dtype)}


SOURCE = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (
        # tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm
        gemm_defines(torch.float16, 28, Schedule(16, 1, 1, 0, 4, 2, 3)),
        gemm_defines(torch.float16, 28, Schedule(64, 2, 1, 4, 3, 1, 2)),
        gemm_defines(torch.bfloat16, 28, Schedule(128, 3, 1, 0, 2, 1, 1)),
        gemm_defines(torch.float16, 64, Schedule(256, 2, 2, 0, 1, 1, 1)),
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return tiles_refusal(problem) or hopper_refusal(problem.device)


def pays(problem: Problem) -> bool:
    """Say whether the kernel is expected to be faster than `unpack_tiles`."""
    return problem.m <= PAYS_MAX_TOKENS


def prepare(problem: Problem, schedule: Schedule | None = None) -> PermutingProduct:
    """Compile and load gemm.cu and permute_x.cu for one problem.

    Args:
        problem: x and w are both float16 or both bfloat16.
        schedule: tile sizes, stages and split-K; None for the one that should be fastest.
    Returns:
        The matmul, accumulated in float32.
    """
    weight, words = tiles_in(problem.spec), int(problem.params["words_limit"])
    schedule = schedule or choose(problem.m, weight, device_facts(problem.device), RATES, problem.constant)
    product = expand_gemm.prepare(
        lambda chosen: SOURCE.build(
            "semisparse_ec_csr_gemm", gemm_defines(problem.dtype, words, chosen), chosen.shared(weight)
        ),
        schedule, weight, BLOCK, problem.spec.shape, problem.device,
    )  # fmt: skip

    def gemm(x: Tensor | PermutedX, packed: Packed, bias: Tensor | None) -> Tensor:
        return product(x, tiles_of(packed), bias)

    return PermutingProduct(gemm, product)

"""Kernel `gemm_wgmma`: GEMM in float16 and bfloat16 on Hopper; kept vectors are expanded in registers for wgmma."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import PermutingProduct, Problem
from semisparse.formats.vector_nm.cuda.operands import operands_refusal
from semisparse.formats.vector_nm.cuda.wgmma_schedule import choose_schedule, tiles_of
from semisparse.formats.vector_nm.storage.disk import groups_and_slots, vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime import expand_gemm
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import PermutedX
from semisparse.runtime.gemm_schedule import MAX_TOKENS, SCALARS, Schedule
from semisparse.runtime.kernel import CudaSource, hopper_refusal
from semisparse.runtime.nvrtc import Defines
from semisparse.runtime.operands import aligned

IN_ORDER = 2
"""The BLOCK of permute_x.cu that keeps the order of columns."""


def _defines(vectors: VectorNM, dtype: torch.dtype, schedule: Schedule) -> Defines:
    """Return the macros of gemm_wgmma.cu."""
    return {"KEEP": vectors.keep, "WINDOW": vectors.window, "LENGTH": vectors.length, **schedule.defines(dtype)}


SOURCE = CudaSource(
    Path(__file__).with_name("gemm_wgmma.cu"),
    (
        # tile_m, warpgroups, cluster, split_k, stages, x_stages, ctas_per_sm, producers
        _defines(VectorNM(16, 32, 32), torch.float16, Schedule(64, 2, 1, 0, 2, 1, 2)),
        _defines(VectorNM(16, 32, 32), torch.bfloat16, Schedule(256, 2, 2, 0, 1, 1, 1)),
        _defines(VectorNM(3, 4, 16), torch.bfloat16, Schedule(32, 1, 1, 4, 3, 1, 3)),
        _defines(VectorNM(1, 32, 128), torch.float16, Schedule(128, 3, 1, 1, 4, 1, 1)),
        _defines(VectorNM(16, 32, 32), torch.float16, Schedule(32, 4, 1, 0, 3, 2, 1, 2)),
        _defines(VectorNM(16, 32, 32), torch.bfloat16, Schedule(128, 3, 1, 0, 3, 1, 1, 2)),
    ),
    architectures=("sm_90a",),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem``; None if it can."""
    vectors = vectors_of(problem.pattern)
    if problem.dtype not in SCALARS:
        return f"takes float16 and bfloat16, got {problem.dtype}"
    if vectors.length % 16 or 32 % vectors.window:
        return f"takes vectors of a multiple of 16 rows and windows that divide 32, got {vectors}"
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return operands_refusal(problem) or hopper_refusal(problem.device)


def prepare(problem: Problem, schedule: Schedule | None = None) -> PermutingProduct:
    """Return the matmul for ``problem``; ``schedule`` overrides the one that should be fastest."""
    (n, k), vectors = problem.spec.shape, vectors_of(problem.pattern)
    tiles = tiles_of(n, k, vectors)
    schedule = schedule or choose_schedule(problem.m, tiles, device_facts(problem.device), problem.constant)
    gemm = expand_gemm.prepare(
        lambda candidate: SOURCE.build(
            "semisparse_vector_nm_gemm_wgmma", _defines(vectors, problem.dtype, candidate), candidate.shared(tiles)
        ),
        schedule, tiles, IN_ORDER, (n, k), problem.device,
    )  # fmt: skip
    _, slots = groups_and_slots(problem.spec)

    def matmul(x: Tensor | PermutedX, packed: Packed, bias: Tensor | None) -> Tensor:
        values, positions = aligned(packed.tensors["values"]), packed.tensors["positions"].contiguous()
        return gemm(x, {"values": values, "positions": positions, "slots": slots}, bias)

    return PermutingProduct(matmul, gemm)

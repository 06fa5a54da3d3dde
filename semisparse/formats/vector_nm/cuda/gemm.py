"""Kernel `gemm`: GEMM in float16 and bfloat16 on tensor cores (mma), straight from the packed weight."""

from __future__ import annotations

from pathlib import Path

import torch

from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import tiled
from semisparse.formats.vector_nm.cuda.schedule import MAX_DENSITY, GemmSchedule
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import VectorNM
from semisparse.runtime.kernel import CudaSource

SHORTEST = VectorNM(16, 32, 8)

SOURCE = CudaSource(
    Path(__file__).with_name("gemm.cu"),
    (*tiled.common_defines(torch.float16, SHORTEST), tiled.common_defines(torch.bfloat16, SHORTEST)[0]),
)


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot compute ``problem``; None if it can."""
    return tiled.refusal(problem, (torch.float16, torch.bfloat16))


def pays(problem: Problem) -> bool:
    """Return whether the density is so low that unpacking the weight for cuBLAS is slower, or hardly faster."""
    return vectors_of(problem.pattern).density <= MAX_DENSITY


def prepare(problem: Problem, schedule: GemmSchedule | None = None) -> Product:
    """Return the matmul for ``problem``; ``schedule`` overrides the one that `tiled.schedule_for` returns."""
    return tiled.prepare(problem, SOURCE, schedule)

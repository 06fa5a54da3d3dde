"""Many tokens in 16 bits on tensor cores (mma)."""

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
    """Say why `prepare` cannot compute ``problem``, or None if it can."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes float16 and bfloat16, got {problem.dtype}"
    return tiled.refusal(problem)


def pays(problem: Problem) -> bool:
    """Whether so few weights are kept that this is faster than unpacking for cuBLAS."""
    return vectors_of(problem.pattern).density <= MAX_DENSITY


def prepare(problem: Problem) -> Product:
    """Prepare to multiply; accumulators are float32.

    Raises:
        KernelError: no stage fits shared memory.
    """
    return prepare_schedule(problem, tiled.schedule_for(problem))


def prepare_schedule(problem: Problem, schedule: GemmSchedule) -> Product:
    """Prepare to multiply with a given schedule, as `prepare` does."""
    build = SOURCE.build("semisparse_vector_nm_gemm", schedule.defines, schedule.shared)
    return tiled.prepare(problem, schedule, build)

"""Any number of tokens in float32 on CUDA cores, without TF32: the kernel of the paper."""

from __future__ import annotations

from pathlib import Path

import torch

from semisparse.formats.kernel import Problem, Product
from semisparse.formats.vector_nm.cuda import tiled
from semisparse.formats.vector_nm.cuda.schedule import GemmSchedule
from semisparse.patterns import VectorNM
from semisparse.runtime.kernel import CudaSource

SOURCE = CudaSource(Path(__file__).with_name("gemm_fp32.cu"), tiled.common_defines(torch.float32, VectorNM(16, 32, 4)))


def refusal(problem: Problem) -> str | None:
    """Say why `prepare` cannot compute ``problem``, or None if it can."""
    if problem.dtype != torch.float32:
        return f"computes float32, got {problem.dtype}"
    return tiled.refusal(problem)


def prepare(problem: Problem) -> Product:
    """Prepare to multiply.

    Raises:
        KernelError: no stage fits shared memory.
    """
    return prepare_schedule(problem, tiled.schedule_for(problem))


def prepare_schedule(problem: Problem, schedule: GemmSchedule) -> Product:
    """Prepare to multiply with a given schedule, as `prepare` does."""
    build = SOURCE.build("semisparse_vector_nm_gemm_fp32", schedule.defines, schedule.shared)
    return tiled.prepare(problem, schedule, build)

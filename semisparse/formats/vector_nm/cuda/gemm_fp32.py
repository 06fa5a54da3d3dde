"""Kernel `gemm_fp32`: GEMM of any M in float32 on CUDA cores, without TF32: the kernel of the paper."""

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
    """Return why the kernel cannot compute ``problem``; None if it can."""
    return tiled.refusal(problem, (torch.float32,))


def prepare(problem: Problem, schedule: GemmSchedule | None = None) -> Product:
    """Return the matmul for ``problem``; ``schedule`` overrides the one that `tiled.schedule_for` returns."""
    return tiled.prepare(problem, SOURCE, schedule)

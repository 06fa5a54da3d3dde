"""The check of operands that all CUDA kernels of the format share."""

from __future__ import annotations

from semisparse.formats.kernel import Problem
from semisparse.runtime.kernel import cuda_refusal


def operands_refusal(problem: Problem) -> str | None:
    """Return why no CUDA kernel can compute ``problem``; None if one may."""
    if problem.weight_dtype != problem.dtype:
        return f"x and w must have the same dtype, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)

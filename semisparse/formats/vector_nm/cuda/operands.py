"""The checks and conversions of operands that all CUDA kernels of the format share."""

from __future__ import annotations

from torch import Tensor

from semisparse.formats.kernel import Problem
from semisparse.runtime.kernel import cuda_refusal


def operands_refusal(problem: Problem) -> str | None:
    """Return why no CUDA kernel can compute ``problem``; None if one may."""
    if problem.weight_dtype != problem.dtype:
        return f"x and w must have the same dtype, got {problem.dtype} and {problem.weight_dtype}"
    return cuda_refusal(problem.device)


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous at a multiple of 16 bytes, as kernels load it; a view may begin anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def bias_like(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the bias contiguous in x's dtype."""
    return None if bias is None else bias.to(x.dtype).contiguous()

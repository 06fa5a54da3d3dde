"""GPU products."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Problem
from semisparse.formats.vector_nm.pack import unpack


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` cannot compute ``problem``, or None if it can."""
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the whole weight and let cuBLAS multiply: any length of vectors, any number of tokens."""
    return F.linear(x, unpack(packed), None if bias is None else bias.to(x.dtype))

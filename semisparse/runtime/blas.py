"""The dense matmul that formats use after unpacking: cuBLAS, with float32 accumulation enforced."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

REDUCED_PRECISION_FLAGS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
"""torch's flag, per dtype, that lets cuBLAS reduce split-K partial sums in that dtype."""


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with cuBLAS. Partial sums are added in float32, whatever torch's flags allow.

    Args:
        x: [M, K].
        weight: [N, K], in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    bias = None if bias is None else bias.to(x.dtype)
    flags, name = torch.backends.cuda.matmul, REDUCED_PRECISION_FLAGS.get(x.dtype, "")
    if not (name and getattr(flags, name)):
        return F.linear(x, weight, bias)
    setattr(flags, name, False)
    try:
        return F.linear(x, weight, bias)
    finally:
        setattr(flags, name, True)

"""The dense product that formats fall to after unpacking: cuBLAS, held to float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def multiply_dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with cuBLAS, partial sums added in float32 whatever torch's flags allow.

    Args:
        x: [M, K].
        weight: [N, K], in x's dtype.
        bias: [N] or None.
    Returns:
        [M, N] in x's dtype.
    """
    flags = torch.backends.cuda.matmul
    allowed = flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction
    flags.allow_fp16_reduced_precision_reduction = flags.allow_bf16_reduced_precision_reduction = False
    try:
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    finally:
        flags.allow_fp16_reduced_precision_reduction, flags.allow_bf16_reduced_precision_reduction = allowed

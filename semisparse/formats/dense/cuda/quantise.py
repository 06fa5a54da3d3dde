"""How x is quantised per token: by a CUDA kernel or, where none can be compiled, by Triton's. Both give equal bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from semisparse.formats.kernel import Problem
from semisparse.runtime import quantise_rows
from semisparse.runtime.kernel import cuda_refusal


def prepare(problem: Problem, dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function of x [M, K] that returns codes [M, K] of ``dtype`` and scales [M] float32."""
    if problem.device.type == "cuda" and cuda_refusal(problem.device) is None:
        return quantise_rows.prepare(problem.device, problem.dtype, dtype, problem.k)
    from semisparse.quant import triton_symmetric

    return partial(triton_symmetric.quantise_rows, dtype=dtype)

"""How x is quantised per token: by a CUDA kernel up to `MAX_ROWS`, else by Triton's. Both give equal bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from semisparse.formats.kernel import Problem
from semisparse.runtime import quantise_rows
from semisparse.runtime.kernel import cuda_refusal

MAX_ROWS = 2048
"""Maximum M for the CUDA kernel: above, Triton's is faster. At 4096 x 4096 on an H200 an eager call of an int8 layer
takes 52 us instead of 65 for 512 tokens and 83 instead of 105 for 2,048, of an fp8 layer 79 and 114, 82 and 120; in a
CUDA graph 20.2 and 19.2, 76.9 and 74.1, 19.2 and 18.0, 65.0 and 62.5. For 8,192 tokens the kernels alone take 35.6 and
26.5 us (results/h200/sweeps/defaults.csv)."""


def prepare(problem: Problem, dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function of x [M, K] that returns codes [M, K] of ``dtype`` and scales [M] float32."""
    has_triton = importlib.util.find_spec("triton") is not None
    compiles = problem.device.type == "cuda" and cuda_refusal(problem.device) is None
    if compiles and (problem.m <= MAX_ROWS or not has_triton):
        return quantise_rows.prepare(problem.device, problem.dtype, dtype, problem.k)
    from semisparse.quant import triton_symmetric

    return partial(triton_symmetric.quantise_rows, dtype=dtype)

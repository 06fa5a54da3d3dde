"""Quantising the rows of a matrix to 8 bits on a GPU, in one launch that takes less of the host than Triton's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from semisparse.runtime.device import device_facts
from semisparse.runtime.elementwise import SCALARS
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.nvrtc import HEADERS, Defines

FP8 = {torch.int8: 0, torch.float8_e4m3fn: 1}
"""The macro FP8, by the dtype of the codes."""

MAX_THREADS = 512
"""Maximum threads per CTA. A CTA has one row."""


def defines(x_dtype: torch.dtype, dtype: torch.dtype, vector: int) -> Defines:
    """Return the macros of quantise_rows.cu."""
    return {"SCALAR": SCALARS[x_dtype], "FP8": FP8[dtype], "VECTOR": vector}


def variants(dtype: torch.dtype) -> tuple[Defines, ...]:
    """Return the macros that tests compile."""
    return tuple(defines(x_dtype, dtype, vector) for x_dtype in SCALARS for vector in (1, 16 // x_dtype.itemsize))


FILE = HEADERS / "elementwise" / "quantise_rows.cu"

INT8 = CudaSource(FILE, variants(torch.int8))
FLOAT8 = CudaSource(FILE, variants(torch.float8_e4m3fn), architectures=("sm_89", "sm_90a", "sm_100a"))
"""Ada is the first to convert to fp8."""


def prepare(
    device: torch.device, x_dtype: torch.dtype, dtype: torch.dtype, columns: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function that quantises each row to 8 bits with its own scale, as `quant.symmetric.quantise_rows` does.

    Args:
        device: a GPU.
        x_dtype: dtype of x, float16, bfloat16 or float32.
        dtype: torch.int8, or torch.float8_e4m3fn (Ada and later).
        columns: of x.
    Returns:
        x [rows, columns] -> codes [rows, columns] of ``dtype`` and scales [rows] float32.
    """
    widest, pdl, source = 16 // x_dtype.itemsize, device_facts(device).has_pdl, INT8 if dtype == torch.int8 else FLOAT8
    builds = {
        vector: source.build("semisparse_quantise_rows", defines(x_dtype, dtype, vector)) for vector in (1, widest)
    }
    vectors = widest if columns % widest == 0 else 1
    kernel = builds[vectors].load(device)

    def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows = len(x)
        codes = torch.empty((rows, columns), dtype=dtype, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        vector, chosen = vectors, kernel
        if x.data_ptr() % 16:
            vector, chosen = 1, builds[1].load(device)
        threads = min(MAX_THREADS, -(-columns // (32 * vector)) * 32)
        chosen((rows, 1, 1), threads, pdl=pdl, x=x, codes=codes, scales=scales, columns=columns)
        return codes, scales

    return quantise

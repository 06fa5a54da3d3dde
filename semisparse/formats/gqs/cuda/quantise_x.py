"""Activations quantised to int8 and dequantised, one scale per token (kind ``w4a8``; GQSA, appendix C)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisparse.runtime.kernel import CudaSource

ELEMENTS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

MAX_THREADS = 512
"""Maximum threads per CTA. A CTA has one token."""

SOURCE = CudaSource(Path(__file__).with_name("quantise_x.cu"), tuple({"SCALAR": name} for name in ELEMENTS.values()))


def prepare(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that quantises and dequantises x, [M, K], as `quant.symmetric` does, in x's dtype."""
    kernel = SOURCE.build("semisparse_gqs_quantise_x", {"SCALAR": ELEMENTS[dtype]}).load(device)

    def quantise(x: Tensor) -> Tensor:
        x = x.contiguous()
        m, k = x.shape
        y = torch.empty_like(x)
        kernel((m, 1, 1), min(MAX_THREADS, -(-k // 32) * 32), x=x, y=y, k=k)
        return y

    return quantise

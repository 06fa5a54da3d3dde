"""Activations in 8 bits, a scale a token, for the kind ``w4a8`` (GQSA, appendix C)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Params
from semisparse.quant import symmetric
from semisparse.runtime.device import device_facts
from semisparse.runtime.launch import CudaKernel
from semisparse.runtime.nvrtc import CudaSource, compile_cubin

SCALARS = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}

MOST_THREADS, WARP = 512, 32
"""Of a thread block, which rounds a token."""

ROUND = CudaSource(Path(__file__).with_name("round.cu"), tuple({"SCALAR": scalar} for scalar in SCALARS.values()))

SOURCES = (ROUND,)


def rounds_activations(params: Params) -> bool:
    """Say whether a weight of such params is multiplied by rounded activations."""
    return str(params.get("kind")).endswith("a8")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each token of x, [M, K], to int8 and give it back in ``dtype``, for products that take no integers."""
    if x.device.type == "cuda":
        return rounded_on_gpu(x).to(dtype)
    codes, scale = symmetric.quantise_rows(x, torch.int8)
    return (codes.float() * scale[:, None]).to(dtype)


def rounded_on_gpu(x: Tensor) -> Tensor:
    """Round each token of x, [M, K], as `rounded` does, in one launch; in x's dtype."""
    x = x.contiguous()
    m, k = x.shape
    y = torch.empty_like(x)
    if m:
        threads = min(MOST_THREADS, -(-k // WARP) * WARP)
        _round_kernel(x.device, x.dtype)(x.device, (m, 1, 1), threads, x.data_ptr(), y.data_ptr(), k)
    return y


@cache
def _round_kernel(device: torch.device, dtype: torch.dtype) -> CudaKernel:
    cubin = compile_cubin(ROUND.path, device_facts(device).arch, {"SCALAR": SCALARS[dtype]})
    return CudaKernel(cubin, "semisparse_gqs_round", (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))

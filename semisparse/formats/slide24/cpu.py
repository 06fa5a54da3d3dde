"""The CPU kernel: a row of the weight is spread over its columns once and multiplied with every token."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.slide24.pack import stored_dtype, window_of
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime import cpp

MAX_TOKENS = 32
"""Of a weight that is not rounded: for more, unpacking it for torch's product is faster."""

LANES = 32
"""The columns of x are filled up to a multiple of it."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "of_octet")),
        *((name, ctypes.c_int64) for name in ("rows", "slots", "window", "type")),
    )


class _Tokens(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int64), ("columns", ctypes.c_int64))


def supports(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS and stored_dtype(problem.params) is None:
        return f"takes up to {MAX_TOKENS} tokens with a weight that is not rounded, got {problem.m}"
    return cpp.refusal()


@cache
def load() -> Product:
    """Compile and open slide24.cpp.

    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(Path(__file__).with_name("slide24.cpp"))
    pointers = (ctypes.POINTER(_Weight), ctypes.POINTER(_Tokens), ctypes.c_void_p, ctypes.c_int)
    library.slide24_product.argtypes, library.slide24_product.restype = pointers, None

    def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        dtype = stored_dtype(packed.params)
        if dtype is None:
            y = _sums(library, x.float(), packed)
        else:
            rounded, x_scale = quantise_rows(x, dtype)
            wide = rounded.to(torch.int16 if dtype == torch.int8 else torch.float32)
            y = _sums(library, wide, packed) * x_scale.double()[:, None] * packed.tensors["scale"].double()
        return (y if bias is None else y + bias).to(x.dtype)

    return product


def _sums(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Multiply x, [M, K] in float32 or int16, with the values as they are stored: [M, N] float64."""
    (m, k), n, window = x.shape, packed.shape[0], window_of(packed.pattern)
    values, metadata, octets = (
        packed.tensors["values"].contiguous(),
        packed.tensors["metadata"].contiguous(),
        _octets(),
    )
    slots = values.shape[1]
    filled = slots // (window - 2) * window
    panel = F.pad(x, (0, filled + -filled % LANES - k)).contiguous()
    weight = _Weight(values.data_ptr(), metadata.data_ptr(), octets.data_ptr(), n, slots, window, TYPES[values.dtype])
    y = torch.empty(m, n, dtype=torch.float64)
    threads = cpp.threads_for(m * n * k)
    library.slide24_product(weight, _Tokens(panel.data_ptr(), m, panel.shape[1]), y.data_ptr(), threads)
    return y


@cache
def _octets() -> Tensor:
    """Give the value of every byte as fp8: [256] float32."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()

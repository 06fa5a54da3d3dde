"""The CPU kernel: straight from the packed bytes for few tokens, band by band through torch for many."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.pack import BLOCK
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import cpp

MAX_DIRECT_TOKENS = 32
"""Bands cost 12.6 ms against 7.0 here and win from 40 (one thread) or 96 (two) tokens on: 4096 x 4096, Zen 4."""
BAND_BYTES = 8 << 20
"""Of float32 weights expanded at a time."""
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Weight(ctypes.Structure):
    """What bitmask.cpp reads; keeps the tensors alive that it points into."""

    _fields_ = (
        ("masks", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )

    def __init__(self, packed: Packed):
        self.tensors = {name: tensor.contiguous() for name, tensor in packed.tensors.items()}
        masks, values, starts = self.tensors["masks"], self.tensors["values"], self.tensors.get("row_starts")
        super().__init__(
            masks.data_ptr(),
            values.data_ptr(),
            None if starts is None else starts.data_ptr(),
            *masks.shape,
            values.shape[-1],
            TYPES[packed.dtype],
        )


def supports(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.dtype not in TYPES:
        return f"x is {problem.dtype}; it takes float32, float16 and bfloat16"
    return cpp.refusal()


@cache
def load() -> Product:
    """Compile and open bitmask.cpp.

    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(Path(__file__).with_name("bitmask.cpp"))
    weight, pointer, count, threads = ctypes.POINTER(_Weight), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bitmask_product.argtypes = (weight, pointer, pointer, count, threads)
    library.bitmask_expand.argtypes = (weight, count, count, count, pointer, threads)
    library.bitmask_product.restype = library.bitmask_expand.restype = None

    def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        compute = _direct if x.shape[0] <= MAX_DIRECT_TOKENS else _by_bands
        y = compute(library, x.float(), packed)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    return product


def _direct(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Multiply x ([M, K] float32) with the packed bytes; the same result for any number of threads."""
    m, k = x.shape
    n = packed.shape[0]
    panel = F.pad(x, (0, -k % BLOCK)).contiguous()
    y = torch.empty(m, n)
    library.bitmask_product(_Weight(packed), panel.data_ptr(), y.data_ptr(), m, cpp.threads_for(m * n * k))
    return y


def _by_bands(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Expand a band of rows at a time to float32 and let torch multiply it with x ([M, K] float32)."""
    n, k = packed.shape
    rows = min(n, max(1, BAND_BYTES // (4 * k)))
    weight = _Weight(packed)
    band = torch.empty(rows, k)
    y = torch.empty(x.shape[0], n)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        library.bitmask_expand(weight, first, count, k, band.data_ptr(), cpp.threads_for(count * k))
        y[:, first : first + count] = F.linear(x, band[:count])
    return y

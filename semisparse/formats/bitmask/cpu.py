"""The CPU kernel: straight from the packed bytes for few tokens, band by band through torch for many."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Problem, Product
from semisparse.formats.bitmask.pack import BLOCK
from semisparse.runtime import cpp

MAX_DIRECT_TOKENS = 16
BAND_BYTES = 8 << 20
"""Of float32 weights expanded at a time."""
WORK_PER_THREAD = 1 << 16
"""Multiply-adds below which another thread costs more than it brings."""

logger = logging.getLogger(__name__)

_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_WEIGHT = (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT64, _INT)
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def supports(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.dtype not in _TYPES:
        return f"x is {problem.dtype}; it takes float32, float16 and bfloat16"
    return cpp.refusal()


@cache
def load() -> Product:
    """Compile and open bitmask.cpp.

    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(Path(__file__).with_name("bitmask.cpp"))
    library.bitmask_product.argtypes = (*_WEIGHT, _POINTER, _POINTER, _INT64, _INT)
    library.bitmask_expand.argtypes = (*_WEIGHT, _INT64, _INT64, _INT64, _POINTER, _INT)
    library.bitmask_product.restype = library.bitmask_expand.restype = None
    if not cpp.find_compiler().threads:
        logger.warning("the C++ compiler has no OpenMP: the cpu kernel of format bitmask runs on one thread")

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
    library.bitmask_product(*_weight(packed), panel.data_ptr(), y.data_ptr(), m, _threads(m * n * k))
    return y


def _by_bands(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Expand a band of rows at a time to float32 and let torch multiply it with x ([M, K] float32)."""
    n, k = packed.shape
    rows = max(1, BAND_BYTES // (4 * k))
    band = torch.empty(min(rows, n), k)
    y = torch.empty(x.shape[0], n)
    weight = _weight(packed)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        library.bitmask_expand(*weight, first, count, k, band.data_ptr(), _threads(count * k))
        y[:, first : first + count] = F.linear(x, band[:count])
    return y


def _weight(packed: Packed) -> tuple[int | None, ...]:
    masks, values = packed.tensors["masks"], packed.tensors["values"]
    starts = packed.tensors.get("row_starts")
    n, blocks = masks.shape
    pointer = None if starts is None else starts.contiguous().data_ptr()
    return masks.data_ptr(), values.data_ptr(), pointer, n, blocks, values.shape[-1], _TYPES[packed.dtype]


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))

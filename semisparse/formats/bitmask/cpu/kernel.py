"""The CPU kernel: few tokens are multiplied with packed bytes; for many, torch multiplies expanded bands of rows."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage.codes import code_bits, entries_of
from semisparse.formats.bitmask.storage.disk import BLOCK, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import cpp

MAX_DIRECT_TOKENS = 32
"""Maximum M without bands. At M = 32 bands take 12.6 ms instead of 7.0; they are faster from M = 40 on (one thread) or
96 (two threads): 4096 x 4096, Zen 4."""

BAND_BYTES = 8 << 20
"""Bytes of a band: the float32 weights expanded at a time."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The number that stands for each dtype in kernel.cpp."""


class _Weight(ctypes.Structure):
    """The struct Weight of kernel.cpp; keeps the tensors alive whose addresses it holds."""

    _fields_ = (
        ("masks", ctypes.c_void_p),
        ("stored", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )

    def __init__(self, packed: Packed):
        self.tensors = {name: tensor.contiguous() for name, tensor in packed.tensors.items()}
        (n, k), bits = packed.shape, code_bits(packed.params)
        blocks = -(-k // BLOCK)
        names = ("masks", "codes" if bits else "values", "scale", "row_starts")
        super().__init__(
            *(self.tensors[name].data_ptr() if name in self.tensors else None for name in names),
            n,
            blocks,
            blocks * entries_of(values_per_block(packed.pattern) or 0, bits),
            bits,
            TYPES[packed.dtype],
        )


def refusal(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if layout_of(problem.params) != "rows":
        return "reads the layout rows, this weight is stored in tiles"
    return cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Return the product, the same for every problem.

    Raises:
        KernelError: kernel.cpp cannot be compiled.
    """
    return load()


@cache
def load() -> Product:
    """Compile and open kernel.cpp, once per process.

    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(Path(__file__).with_name("kernel.cpp"))
    weight, pointer, count, threads = ctypes.POINTER(_Weight), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.bitmask_matmul.argtypes = (weight, pointer, pointer, count, threads)
    library.bitmask_expand.argtypes = (weight, count, count, count, pointer, threads)
    library.bitmask_matmul.restype = library.bitmask_expand.restype = None

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        compute = _direct if x.shape[0] <= MAX_DIRECT_TOKENS else _by_bands
        y = compute(library, x.float(), packed)
        if bias is not None:
            y += bias
        return y.to(x.dtype)

    return matmul


def _direct(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Multiply x, [M, K] float32, with the packed bytes; the same result for any number of threads."""
    m, k = x.shape
    n = packed.shape[0]
    padded = F.pad(x, (0, -k % BLOCK)).contiguous()
    y = x.new_empty(m, n)
    library.bitmask_matmul(_Weight(packed), padded.data_ptr(), y.data_ptr(), m, cpp.threads_for(m * n * k))
    return y


def _by_bands(library: ctypes.CDLL, x: Tensor, packed: Packed) -> Tensor:
    """Expand a band of rows at a time to float32 and let torch multiply it with x, [M, K] float32."""
    n, k = packed.shape
    rows = min(n, max(1, BAND_BYTES // (4 * k)))
    weight = _Weight(packed)
    band = x.new_empty(rows, k)
    y = x.new_empty(x.shape[0], n)
    for first in range(0, n, rows):
        count = min(rows, n - first)
        library.bitmask_expand(weight, first, count, k, band.data_ptr(), cpp.threads_for(count * k))
        y[:, first : first + count] = F.linear(x, band[:count])
    return y

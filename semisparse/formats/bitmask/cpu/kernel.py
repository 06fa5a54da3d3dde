"""The CPU kernel: kernel.cpp unpacks rows, and runtime/row_matmul.py multiplies them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.bitmask.storage.codes import code_bits, entries_of
from semisparse.formats.bitmask.storage.disk import BLOCK, values_per_block
from semisparse.formats.bitmask.storage.layouts import layout_of
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime import cpp, row_matmul

BAND_ROWS = 8
"""kBandRows of kernel.cpp."""

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
        return "supports layout 'rows' only; this weight has layout 'tiles'"
    return cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Return the matmul function; it is the same for every problem.

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
    matmul_of = row_matmul.load(Path(__file__).with_name("kernel.cpp"), "bitmask", BAND_ROWS)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        operand = x.to(row_matmul.operand_dtype(x.dtype, packed.dtype, matmul_of.has_bfloat16))
        return matmul_of.multiply(_Weight(packed), operand, packed.shape[0], BLOCK, bias).to(x.dtype)

    return matmul

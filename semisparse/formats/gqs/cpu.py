"""The CPU kernel: few tokens straight from the packed bytes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Problem, Product
from semisparse.formats.gqs.activations import rounded, rounds_activations
from semisparse.formats.gqs.pack import TILE_GROUPS, size_of
from semisparse.quant.group import KINDS
from semisparse.runtime import cpp

MAX_TOKENS = 32
"""For more, unpacking the weight once for all tokens is faster."""

WORK_PER_THREAD = 1 << 16
"""Multiply-adds below which another thread costs more than it brings."""

STORED = ("masks", "starts", "codes", "scale", "zero")

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Weight(ctypes.Structure):
    """What gqs.cpp reads; keeps the tensors alive that it points into."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STORED),
        *((name, ctypes.c_int64) for name in ("rows", "row_tiles", "column_tiles", "size", "bits", "type")),
    )

    def __init__(self, packed: Packed):
        self.tensors = [packed.tensors[name].contiguous() for name in STORED]
        super().__init__(
            *(tensor.data_ptr() for tensor in self.tensors),
            packed.shape[0],
            *packed.tensors["masks"].shape,
            size_of(packed.pattern),
            KINDS[str(packed.params["kind"])],
            TYPES[packed.dtype],
        )


def supports(problem: Problem) -> str | None:
    """Say why the kernel cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    if problem.dtype not in TYPES:
        return f"x is {problem.dtype}; it takes float32, float16 and bfloat16"
    return cpp.refusal()


@cache
def load() -> Product:
    """Compile and open gqs.cpp.

    Raises:
        KernelError: it cannot be compiled.
    """
    library = cpp.load(Path(__file__).with_name("gqs.cpp"))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.gqs_product.argtypes = (ctypes.POINTER(_Weight), pointer, count, pointer, count, ctypes.c_int)
    library.gqs_product.restype = None

    def product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        (m, k), n = x.shape, packed.shape[0]
        wide = rounded(x, torch.float32) if rounds_activations(packed.params) else x.float()
        panel = F.pad(wide, (0, -k % (TILE_GROUPS * size_of(packed.pattern)))).contiguous()
        y = torch.zeros(m, n)
        threads = max(1, min(torch.get_num_threads(), m * n * k // WORK_PER_THREAD))
        library.gqs_product(_Weight(packed), panel.data_ptr(), panel.shape[1], y.data_ptr(), m, threads)
        return (y if bias is None else y + bias).to(x.dtype)

    return product

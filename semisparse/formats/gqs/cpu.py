"""The CPU kernels: few tokens straight from the packed bytes, and rounded activations, however many."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.gqs.activations import rounded, rounds_activations
from semisparse.formats.gqs.pack import TILE_GROUPS, size_of
from semisparse.formats.kernel import Problem, Product
from semisparse.quant.group import KINDS
from semisparse.runtime import cpp

MAX_TOKENS = 32
"""For more, unpacking the weight once for all tokens is faster."""

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
        threads = cpp.threads_for(m * n * k)
        library.gqs_product(_Weight(packed), panel.data_ptr(), panel.shape[1], y.data_ptr(), m, threads)
        return (y if bias is None else y + bias).to(x.dtype)

    return product


def unpack_refusal(problem: Problem) -> str | None:
    """Say why `unpack_and_multiply` is not for ``problem``, or None if it is."""
    return None if rounds_activations(problem.params) else "multiplies kind w4a8; others need not round x"


def unpack_and_multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Round each token of x, [M, K], to 8 bits, and multiply by the unpacked weight in float32: [M, N] in x's dtype."""
    wide_bias = None if bias is None else bias.float()
    return F.linear(rounded(x, torch.float32), packed.unpack().float(), wide_bias).to(x.dtype)

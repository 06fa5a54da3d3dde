"""The CPU kernels: one for up to 32 tokens, straight from the packed bytes, and one that unpacks the whole weight."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.gqs.storage.disk import TENSORS, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS
from semisparse.formats.kernel import Problem, Product
from semisparse.quant.group import KINDS
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime import cpp

MAX_TOKENS = 32
"""Maximum M of `cpu`. Above it, unpacking the weight once for all tokens is faster."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The numbers of dtypes in runtime/host/scalars.hpp."""


class _Weight(ctypes.Structure):
    """The struct `Weight` of kernel.cpp. It keeps the tensors alive to which it points."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in ("rows", "row_tiles", "column_tiles", "size", "bits", "type")),
    )

    def __init__(self, packed: Packed):
        self.tensors = [packed.tensors[name].contiguous() for name in TENSORS]
        super().__init__(
            *(tensor.data_ptr() for tensor in self.tensors),
            packed.shape[0],
            *packed.tensors["masks"].shape,
            group_size(packed.pattern),
            KINDS[str(packed.params["kind"])],
            TYPES[packed.dtype],
        )


def refusal(problem: Problem) -> str | None:
    """Return why `prepare` cannot compute ``problem`` here, or None if it can."""
    if problem.m > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} tokens, got {problem.m}"
    return cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Return the matmul straight from the packed bytes, in float32.

    Raises:
        KernelError: kernel.cpp cannot be compiled.
    """
    library = _library()

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        (m, k), n = x.shape, packed.shape[0]
        padded = F.pad(_as_multiplied(x, packed), (0, -k % (CHUNK_GROUPS * group_size(packed.pattern)))).contiguous()
        y = padded.new_zeros(m, n)
        threads = cpp.threads_for(m * n * k)
        library.gqs_matmul(_Weight(packed), padded.data_ptr(), padded.shape[1], y.data_ptr(), m, threads)
        return (y if bias is None else y + bias).to(x.dtype)

    return matmul


@cache
def _library() -> ctypes.CDLL:
    library = cpp.load(Path(__file__).with_name("kernel.cpp"))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.gqs_matmul.argtypes = (ctypes.POINTER(_Weight), pointer, count, pointer, count, ctypes.c_int)
    library.gqs_matmul.restype = None
    return library


def prepare_unpack(problem: Problem) -> Product:
    """Return the matmul that unpacks the whole weight and computes in float32."""

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return F.linear(_as_multiplied(x, packed), packed.unpack().float(), wide_bias).to(x.dtype)

    return matmul


def _as_multiplied(x: Tensor, packed: Packed) -> Tensor:
    """Return x, [M, K], in float32; for ``w4a8`` with each token quantised to int8 and dequantised."""
    if not quantises_x(packed.params):
        return x.float()
    codes, scale = quantise_rows(x, torch.int8)
    return codes.float() * scale[:, None]

"""The CPU kernels: one in C++, which unpacks a few rows at a time, and one in torch, which unpacks all."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.gqs.storage.disk import TENSORS, group_size, quantises_x
from semisparse.formats.gqs.storage.masks import CHUNK_GROUPS, CHUNK_ROWS
from semisparse.formats.kernel import Problem, Product
from semisparse.quant.group import KINDS
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime import cpp, row_matmul

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
    return cpp.refusal()


def prepare(problem: Problem) -> Product:
    """Return the matmul by kernel.cpp and runtime/row_matmul.py.

    Raises:
        KernelError: kernel.cpp cannot be compiled.
    """
    matmul_of = row_matmul.load(Path(__file__).with_name("kernel.cpp"), "gqs", CHUNK_ROWS)

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        operand = _as_multiplied(x, packed, row_matmul.operand_dtype(x.dtype, packed.dtype, matmul_of.has_bfloat16))
        grain = CHUNK_GROUPS * group_size(packed.pattern)
        return matmul_of.multiply(_Weight(packed), operand, packed.shape[0], grain, bias).to(x.dtype)

    return matmul


def prepare_unpack(problem: Problem) -> Product:
    """Return the matmul that unpacks the whole weight and computes in float32."""

    def matmul(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        return F.linear(_as_multiplied(x, packed, torch.float32), packed.unpack().float(), wide_bias).to(x.dtype)

    return matmul


def _as_multiplied(x: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return x, [M, K], in ``dtype``; for ``w4a8`` in float32, each token quantised to int8 and dequantised."""
    if not quantises_x(packed.params):
        return x.to(dtype)
    codes, scale = quantise_rows(x, torch.int8)
    return codes.float() * scale[:, None]

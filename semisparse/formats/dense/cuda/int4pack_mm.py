"""int4 weights: torch's own GEMM for them, ``torch._weight_int4pack_mm``."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.dense.storage.int4 import GROUP
from semisparse.formats.kernel import Problem, Product
from semisparse.runtime.device import device_facts


def refusal(problem: Problem) -> str | None:
    """Refuse what torch's int4 GEMM cannot compute."""
    if problem.params.get("kind") != "int4":
        return "multiplies kind int4"
    if problem.dtype != torch.bfloat16:
        return f"torch's int4 GEMM takes bfloat16, x is {problem.dtype}"
    if device_facts(problem.device).capability < (8, 0):
        return "needs compute capability 8.0 (Ampere) or later"
    return None


def prepare(problem: Problem) -> Product:
    """Return torch's GEMM."""
    return _multiply


def _multiply(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    y = torch._weight_int4pack_mm(_aligned(x), packed.tensors["values"], GROUP, packed.tensors["scale_and_zero"])
    return y if bias is None else y + bias.to(y.dtype)


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy, that is contiguous and begins at a multiple of 16 bytes.

    torch reads x in vectors without checking: an unaligned x ends in "misaligned address", after which the process can
    no longer use CUDA.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()

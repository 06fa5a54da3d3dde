"""Dense products that torch offers: the baselines. Each says what it refuses."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.dense.int4 import GROUP
from semisparse.formats.kernel import Problem
from semisparse.quant.symmetric import FP8_MAX


def blas_refusal(problem: Problem) -> str | None:
    """Refuse rounded weights and mixed dtypes."""
    if problem.params:
        return f"multiplies the weight as it is, this one is {problem.params['kind']}"
    if problem.weight_dtype != problem.dtype:
        return f"x is {problem.dtype}, the weight {problem.weight_dtype}"
    return None


def blas(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply by torch's own linear: cuBLAS on a GPU, which adds partial sums in 16 bits where torch's flags let it.

    x is made contiguous because the bits of the result would depend on how it lies in memory.
    """
    return F.linear(x.contiguous(), packed.tensors["values"], None if bias is None else bias.to(x.dtype))


def triton_int8_refusal(problem: Problem) -> str | None:
    """Refuse other kinds, and a machine without Triton."""
    if problem.params.get("kind") != "int8":
        return "multiplies kind int8"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'semisparse[cuda]'"
    return None


def int_mm_refusal(problem: Problem) -> str | None:
    """Refuse what ``torch._int_mm`` cannot compute."""
    if problem.params.get("kind") != "int8":
        return "multiplies kind int8"
    if problem.m <= 16 or problem.n % 8 or problem.k % 8:
        return f"torch._int_mm takes M above 16 and N, K in multiples of 8, got {problem.m}, {problem.n}, {problem.k}"
    return None


def int_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Round x to int8 by rows, multiply exactly, scale (weak on Hopper: 620 to 840 TOPS of 1,979 on an H200)."""
    from semisparse.quant.triton_symmetric import quantise_rows

    rounded, scale = quantise_rows(x, torch.int8)
    y = torch._int_mm(rounded, packed.tensors["values"].t()) * scale[:, None] * packed.tensors["scale"]
    return (y if bias is None else y + bias).to(x.dtype)


def scaled_mm_refusal(problem: Problem) -> str | None:
    """Refuse what ``torch._scaled_mm`` cannot compute."""
    if problem.params.get("kind") not in ("fp8", "fp8_tensor"):
        return "multiplies kinds fp8 and fp8_tensor"
    if torch.cuda.get_device_capability(problem.device) < (8, 9):
        return "fp8 products need compute capability 8.9 (Ada) or later"
    if problem.dtype != torch.bfloat16:
        return f"torch._scaled_mm gives bfloat16 for every kind of scale, x is {problem.dtype}"
    if problem.n % 16 or problem.k % 16:
        return f"torch._scaled_mm takes N and K in multiples of 16, got {problem.n}, {problem.k}"
    return None


def scaled_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Round x to fp8, by rows or as a whole as the weight was, and multiply with the scales fused."""
    weight, scale = packed.tensors["values"].t(), packed.tensors["scale"]
    if packed.params["kind"] == "fp8":
        from semisparse.quant.triton_symmetric import quantise_rows

        rounded, x_scale = quantise_rows(x, torch.float8_e4m3fn)
        x_scale, scale = x_scale[:, None], scale[None, :]
    else:
        amax = torch.linalg.vector_norm(x, ord=torch.inf, dtype=torch.float32)
        x_scale = torch.where(amax == 0, 1.0, amax / FP8_MAX).reshape(1)
        rounded = (x / x_scale).to(torch.float8_e4m3fn)
    y = torch._scaled_mm(rounded, weight, scale_a=x_scale, scale_b=scale, out_dtype=x.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def int4pack_mm_refusal(problem: Problem) -> str | None:
    """Refuse what torch's int4 product cannot compute."""
    if problem.params.get("kind") != "int4":
        return "multiplies kind int4"
    if problem.dtype != torch.bfloat16:
        return f"torch's int4 product takes bfloat16, x is {problem.dtype}"
    if torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "torch's int4 product needs compute capability 8.0 or later"
    return None


def int4pack_mm(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Multiply by torch's int4 weights."""
    y = torch._weight_int4pack_mm(x, packed.tensors["values"], GROUP, packed.tensors["scale_and_zero"])
    return y if bias is None else y + bias.to(y.dtype)

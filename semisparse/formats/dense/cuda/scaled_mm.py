"""fp8 weights: x is quantised per token or per tensor, then ``torch._scaled_mm`` with the scales in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.dense.cuda import quantise
from semisparse.formats.kernel import Problem, Product
from semisparse.quant.symmetric import FP8_MAX
from semisparse.runtime.device import device_facts


def refusal(problem: Problem) -> str | None:
    """Refuse what ``torch._scaled_mm`` cannot compute."""
    if problem.params.get("kind") not in ("fp8", "fp8_tensor"):
        return "multiplies kinds fp8 and fp8_tensor"
    if device_facts(problem.device).capability < (8, 9):
        return "needs compute capability 8.9 (Ada) or later"
    if problem.dtype != torch.bfloat16:
        return f"torch._scaled_mm returns bfloat16 for every kind of scale, x is {problem.dtype}"
    if problem.n % 16 or problem.k % 16:
        return f"torch._scaled_mm takes N and K in multiples of 16, got {problem.n}, {problem.k}"
    return None


def prepare(problem: Problem) -> Product:
    """Return the function that quantises x per tensor for kind fp8_tensor, per token for kind fp8."""
    if problem.params["kind"] == "fp8_tensor":
        return _per_tensor
    quantise_x = quantise.prepare(problem, torch.float8_e4m3fn)

    def per_token(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        rounded, scale = quantise_x(x)
        return _multiply(rounded, scale[:, None], packed, packed.tensors["scale"][None, :], bias, x.dtype)

    return per_token


def _per_tensor(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    amax = torch.linalg.vector_norm(x, ord=torch.inf, dtype=torch.float32)
    scale = torch.where(amax == 0, 1.0, amax / FP8_MAX).reshape(1)
    rounded = (x / scale).to(torch.float8_e4m3fn)
    return _multiply(rounded, scale, packed, packed.tensors["scale"], bias, x.dtype)


def _multiply(
    x: Tensor, x_scale: Tensor, packed: Packed, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = torch._scaled_mm(x, packed.tensors["values"].t(), scale_a=x_scale, scale_b=w_scale, out_dtype=dtype)
    return y if bias is None else y + bias.to(dtype)

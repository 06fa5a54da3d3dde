"""int8 weights on a CPU: x is quantised per token; ``torch._int_mm`` adds exactly in int32; then both scales apply."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.formats.base import Packed
from semisparse.formats.kernel import Problem, Product
from semisparse.quant.symmetric import quantise_rows
from semisparse.runtime.device import cpu_multiplies_int8


def refusal(problem: Problem) -> str | None:
    """Refuse other kinds, and CPUs without VNNI, where int8 dot products are slow and may saturate."""
    if problem.params.get("kind") != "int8":
        return "multiplies kind int8"
    if not cpu_multiplies_int8():
        return "needs a CPU with AVX-512 VNNI"
    return None


def prepare(problem: Problem) -> Product:
    """Return the same function for every problem."""
    return _linear


def _linear(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    rounded, scale = quantise_rows(x, torch.int8)
    accumulators = torch._int_mm(rounded.contiguous(), packed.tensors["values"].t())
    y = accumulators.float() * scale[:, None] * packed.tensors["scale"]
    return (y if bias is None else y + bias.float()).to(x.dtype)

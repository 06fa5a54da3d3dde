"""Products on a CPU. Those of rounded weights round x too; their sums are exact in float64, in any order.

An int8 product is below 2^14, and one of two fp8 values a multiple of 2^-18 below 2^18: 36 bits, of float64's 53.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Pass, Problem, fused_cost
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import stored_dtype, unpack_lifted, unpack_stored, window_of
from semisparse.quant.symmetric import quantise_rows

UNITS = {None: "tensor fp16", torch.int8: "tensor int8", torch.float8_e4m3fn: "tensor fp8"}


def dense(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Unpack the weight and multiply as a dense layer of the same numbers does."""
    dtype = stored_dtype(packed.params)
    weight = unpack_stored(packed)
    if dtype is None:
        return _wide_product(x, weight, bias)
    return _scaled_product(*quantise_rows(x, dtype), weight, packed.tensors["scale"], bias, x.dtype)


def lifted(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Lift x and multiply with the 2:4 weight, step by step as sparse tensor cores are made to do."""
    dtype, window = stored_dtype(packed.params), window_of(packed.pattern)
    weight = unpack_lifted(packed)
    if dtype is None:
        return _wide_product(lift(x, window), weight, bias)
    return _scaled_product(*quantise_and_lift(x, dtype, window), weight, packed.tensors["scale"], bias, x.dtype)


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(wide).contiguous(), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def _scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = (x.double() @ weight.double().T) * x_scale.double()[:, None] * scale.double()
    return (y if bias is None else y + bias).to(dtype)


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes on sparse tensor cores, which take no float32: lifting x, then a product at twice the rate."""
    if not problem.params and problem.dtype == torch.float32:
        return fused_cost(problem, weight_bytes)
    m, n, k = problem.m, problem.n, problem.k
    columns = lifted_columns(k, window_of(problem.pattern))
    dtype = stored_dtype(problem.params)
    width = problem.dtype.itemsize
    lifted_bytes = m * columns * (width if dtype is None else dtype.itemsize)
    return (
        Pass(m * k * width + lifted_bytes, 0, "fp32"),
        Pass(weight_bytes + lifted_bytes + m * n * width, m * n * columns, UNITS[dtype]),
    )

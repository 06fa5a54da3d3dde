"""Products on a CPU. Those of rounded weights round x too; their sums are exact in float64, in any order.

An int8 product is below 2^14, and one of two fp8 values a multiple of 2^-18 below 2^18: 36 bits, of float64's 53.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.slide24.lift import lift, quantise_and_lift
from semisparse.formats.slide24.pack import stored_dtype, unpack_lifted, unpack_stored, window_of
from semisparse.quant.symmetric import quantise_rows


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

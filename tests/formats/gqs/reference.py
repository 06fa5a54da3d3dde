"""Weights, operands and float64 references for the tests of format gqs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.formats.kernel import Problem, Product
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.quant.symmetric import quantise_rows

GQS = get_format("gqs")


def packed_weight(n: int, k: int, pattern: str = "g16@50%", dtype=torch.float16, **options) -> Packed:
    """Pack a random weight [N, K] whose row 3 is all zeros, if it has one."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k))
    weight[3:4] = 0
    return GQS.pack((weight * parse_pattern(pattern).mask(weight.abs())).to(dtype), pattern, **options)


def operands(packed: Packed, m: int, dtype=None, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return random x [M, K] and bias [N]."""
    n, k = packed.shape
    generator = torch.Generator().manual_seed(m)
    x, bias = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
    return x.to(device, dtype or packed.dtype), bias.to(device, dtype or packed.dtype)


def stored_weight(packed: Packed) -> Tensor:
    """Return the stored weight, dequantised in float64 without rounding to the weight's dtype."""
    tensors = {**packed.tensors, "scale": packed.tensors["scale"].float()}
    return Packed(replace(packed.spec, dtype=torch.float32), tensors).unpack().double()


def quantised(x: Tensor) -> Tensor:
    """Return what int8 with one scale per token makes of x, in float64."""
    codes, scale = quantise_rows(x.cpu(), torch.int8)
    return (codes.double() * scale.double()[:, None]).to(x.device)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare y with x @ weight.T + bias in float64: K additions in float32, then rounded to y's dtype."""
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    # A GPU's tensor cores truncate sums, where a CPU rounds to nearest.
    accumulated = (x.shape[1] + 4) * (2.0**-23 if y.is_cuda else 2.0**-24) * magnitude
    rounded = torch.finfo(y.dtype).eps / 2 * (exact.abs() + accumulated) + 1e-7
    excess = (y.double() - exact).abs() - accumulated - rounded
    assert y.shape == exact.shape
    assert excess.nan_to_num(nan=float("inf")).max() <= 0, f"off by {excess.max():.3g} more than rounding explains"


def check_product(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
    """Compare y with the product of the stored weight; of w4a8 with that of x rounded to 8 bits."""
    multiplied = quantised(x).float().to(x.dtype) if packed.params["kind"] == "w4a8" else x
    check(y, multiplied, packed.unpack(), bias)


def check_operands_of_any_layout(prepare: Callable[[Problem], Product], k: int, dtype: torch.dtype, m: int) -> None:
    """Expect the same bits of x strided or not aligned to 16 bytes, tensors that begin anywhere, and a wider bias."""
    packed = packed_weight(20, k, "g16@0%", dtype, kind="w4")
    x, bias = operands(packed, m)
    expected = prepare(problem_of(x, packed))(x, packed, bias)
    moved = Packed(packed.spec, {name: torch.cat((t[:1], t))[1:] for name, t in packed.tensors.items()})
    for same_x in (x.T.contiguous().T, torch.cat((x[0, :1], x.flatten()))[1:].view(x.shape)):
        assert torch.equal(prepare(problem_of(x, packed))(same_x, moved, bias.float()), expected)

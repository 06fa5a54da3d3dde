"""Compare a product with float64, within bounds of rounding errors."""

from dataclasses import replace

import torch
from torch import Tensor

from semisparse.formats import Packed, get_format
from semisparse.quant.symmetric import quantise_rows

ROUNDOFF = {"cpu": 2.0**-24, "cuda": 2.0**-23}
"""Relative error of one float32 addition: a CPU rounds to nearest, tensor cores truncate."""


def sum_error(packed: Packed) -> float:
    """Return the error of K additions as a share of their magnitudes; an H200's fp8 sums were off by 2**-12 at most."""
    if packed.device.type == "cuda" and str(packed.params.get("kind")).startswith("fp8"):
        return 2.0**-11
    return (packed.shape[1] + 2) * ROUNDOFF[packed.device.type]


def operands(packed: Packed, m: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw x [m, K] and a bias [N] on the weight's device."""
    n, k = packed.shape
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
    return x.to(dtype).to(packed.device), bias.to(dtype).to(packed.device)


def check_product(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None, multiplied: Tensor | None = None) -> None:
    """Compare with float64: an error of K float32 additions, then one rounding to the output's dtype.

    With a bias the product may be rounded before: torch's own linear does so for one or two tokens on a GPU.
    ``multiplied`` is x rounded as the kernel rounds it; x itself if None.
    """
    wide_x = (x if multiplied is None else multiplied).double()
    assert y.dtype == x.dtype
    off = min(_excess(y, wide_x, weight, bias, sum_error(packed)) for weight in _weights(packed))
    assert off <= 0, f"bias {bias is not None}: off by {off:.3g} more than rounding explains"


TORCH_KERNELS = ("blas", "int4pack_mm", "scaled_mm", "cusparselt")
"""Kernels of torch or of a library, whose accumulation and intermediate rounding are unknown."""


def exact_products(x: Tensor, packed: Packed, bias: Tensor | None) -> list[Tensor]:
    """Return the products in float64 of x and of x rounded as the kind says."""
    wide_bias = 0 if bias is None else bias.double()
    operands = [x, *_rounded(x, str(packed.params.get("kind")))]
    return [operand.double() @ weight.T + wide_bias for operand in operands for weight in _weights(packed)]


def check_norm(y: Tensor, expected: Tensor) -> bool:
    """Return whether y differs by no more than four roundings to 8 bits of mantissa, as in bfloat16."""
    return bool((y.double() - expected.double()).norm() <= 4 * 2**-9 * expected.double().norm())


def check_any_rounding(y: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
    """Compare with float64; where the kind says so, x may also be rounded to 8 bits, and back to its own dtype."""
    candidates = [None, *_rounded(x, str(packed.params.get("kind")))]
    for candidate in candidates[:-1]:
        try:
            return check_product(y, x, packed, bias, candidate)
        except AssertionError:
            continue
    return check_product(y, x, packed, bias, candidates[-1])


def _rounded(x: Tensor, kind: str) -> list[Tensor]:
    """Return x as kernels of 8-bit activations multiply it; nothing for a kind that does not round x."""
    if kind == "fp8_tensor":
        scale = x.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        return [(x.float() / scale).to(torch.float8_e4m3fn).double() * scale.double()]
    dtype = {"int8": torch.int8, "w4a8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind)
    if dtype is None:
        return []
    codes, scale = quantise_rows(x.cpu(), dtype)
    wide = (codes.double() * scale.double()[:, None]).to(x.device)
    return [wide, wide.float().to(x.dtype)]


def _weights(packed: Packed) -> list[Tensor]:
    """Return what a kernel may multiply by: the unpacked weight and, where that rounds, what is stored."""
    form = get_format(packed.spec.format)
    if form.lossless and "kind" not in packed.params:
        return [packed.unpack().double()]
    packed = form.arrange(packed, "cpu")  # the layout of a checkpoint may have float32 scales
    own = [tensor.name for tensor in form.specs(packed.spec) if tensor.dtype is None]
    widened = {name: packed.tensors[name].float() for name in own}
    wide = Packed(replace(packed.spec, dtype=torch.float32), {**packed.tensors, **widened})
    return [packed.unpack().double(), wide.unpack().double()]


def _excess(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, error: float) -> float:
    """Return the largest error beyond the bound of rounding errors; NaN counts as infinity.

    ``error`` is that of the additions, as a share of the magnitudes added.
    """
    wide_bias = torch.zeros(len(weight), device=x.device) if bias is None else bias.double()
    product = x @ weight.T
    exact = product + wide_bias
    assert y.shape == exact.shape
    magnitude = x.abs() @ weight.abs().T + wide_bias.abs()
    accumulated = error * magnitude
    facts = torch.finfo(y.dtype)
    rounded = facts.eps / 2 * (exact.abs() + accumulated) + facts.smallest_normal * facts.eps
    if bias is not None:
        rounded += facts.eps / 2 * (product.abs() + accumulated)
    excess = (y.double() - exact).abs() - accumulated - rounded
    return excess.nan_to_num(nan=float("inf")).max().item()

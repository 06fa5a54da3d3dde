"""The Triton kernels of rounding against the columns of torch."""

import os

import pytest
import torch

from semisparse.compress.prune import quantise, sparsegpt
from semisparse.compress.prune.factor import factorise
from semisparse.compress.prune.quantise import round_by_descent
from semisparse.quant.group import scales_of

pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = 320 if DEVICE == "cuda" and "SEMISPARSE_DRAWS" not in os.environ else 20
"""Triton's interpreter is slow, and so are torch's columns under compute-sanitizer: 320 had not ended after 20 s."""


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a Hessian, the factor of its inverse, a weight, a mask of 60 % and the columns' units."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    x = x / x.square().mean(0).sqrt()
    hessian = x.T @ x / len(x)
    upper = factorise(hessian, 0.01).upper
    weight = torch.randn(6, COLUMNS, generator=generator)
    kept = torch.rand(6, COLUMNS, generator=generator) < 0.6
    units = torch.rand(COLUMNS, generator=generator) + 0.5
    hessian.diagonal().add_(0.01)
    return tuple(tensor.to(DEVICE) for tensor in (hessian, upper, weight, kept, units))


@pytest.mark.parametrize(("bits", "size"), [((2, 3), 8), ((4,), 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_groups_are_rounded_as_in_torch(
    bits: tuple[int, ...], size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    _, upper, weight, kept, units = problem()
    rest = (upper, bits, size, units, dtype, (units / upper.diagonal()).square())
    monkeypatch.setattr(sparsegpt, "has_rounding_kernel", lambda weight: False)
    expected, expected_scales = sparsegpt.quantise_columns(weight, kept, *rest)
    monkeypatch.setattr(sparsegpt, "has_rounding_kernel", lambda weight: True)
    found, scales = sparsegpt.quantise_columns(weight, kept, *rest)
    assert len(found) == len(bits)
    for each, wanted, own, others in zip(found, expected, scales, expected_scales, strict=True):
        assert (each != 0).any()
        assert torch.equal(each[~kept], torch.zeros_like(each[~kept]))
        assert torch.allclose(each, wanted, rtol=1e-4, atol=1e-5)
        assert torch.allclose(own.scale, others.scale, rtol=1e-3)


def test_several_numbers_of_bits_give_what_each_gives_alone():
    _, upper, weight, kept, units = problem()
    rest = (8, units, torch.float16, None)
    together, scales = sparsegpt.quantise_columns(weight, kept, upper, (2, 4), *rest)
    for bits, weights, own in zip((2, 4), together, scales, strict=True):
        [alone], [expected] = sparsegpt.quantise_columns(weight, kept, upper, (bits,), *rest)
        assert own.bits == bits
        assert torch.allclose(weights, alone, rtol=1e-4, atol=1e-5)
        assert torch.equal(own.scale, expected.scale)


def test_descent_ends_as_in_torch(monkeypatch: pytest.MonkeyPatch):
    hessian, _, weight, kept, units = problem(1)
    pruned, columns = weight * kept, torch.arange(COLUMNS, device=DEVICE)
    scales = [scales_of(pruned / units, bits, 8, torch.float16, symmetric=True) for bits in (4, 8)]
    monkeypatch.setattr(quantise, "BLOCK_COLUMNS", 8)
    monkeypatch.setattr(quantise, "has_rounding_kernel", lambda weight: False)
    expected = round_by_descent(pruned, kept, hessian, weight, scales, columns, units)
    monkeypatch.setattr(quantise, "has_rounding_kernel", lambda weight: True)
    found = round_by_descent(pruned, kept, hessian, weight, scales, columns, units)
    for each, wanted in zip(found, expected, strict=True):
        assert (each != 0).any()
        assert torch.allclose(each, wanted, rtol=1e-4, atol=1e-5)

"""Three bfloat16 products instead of a float32 one: their error, and where they are taken."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from semisparse.compress import three_pass
from semisparse.compress.three_pass import ThreePassLinear, linear_with_gradients, outer_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = 2**-15
"""Error relative to the norm; one bfloat16 product has 2^-9."""


def test_sums_of_outer_products_against_float64():
    generator = torch.Generator().manual_seed(0)
    left, right = (3 * torch.randn(500, columns, generator=generator).to(DEVICE) for columns in (40, 24))
    exact = left.double().T @ right.double()
    assert (outer_sum(left, right) - exact).norm() <= ERROR * exact.norm()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("low_first", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_splits_as_torch_does(dim: int, low_first: bool, transposed: bool):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    from semisparse.compress.three_pass_triton import split

    x = torch.randn(13, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x = x.T if transposed else x
    found = split(x, dim, low_first)
    high = x.bfloat16()
    halves = (high, high, (x - high).bfloat16())
    expected = torch.cat(halves[::-1] if low_first else halves, dim)
    assert found.shape == expected.shape
    if DEVICE == "cuda":  # Triton's interpreter rounds to bfloat16 in another way
        assert torch.equal(found, expected)
    first, second, third = found.float().chunk(3, dim)
    assert torch.equal(second, first if not low_first else third)
    assert ((first + third) - x).abs().max() <= ERROR * x.abs().max()


@pytest.mark.skipif(DEVICE == "cpu", reason="CPUs compute in float32: no GPU here")
def test_linear_layers_on_a_gpu_against_float64(monkeypatch):
    monkeypatch.setattr(three_pass, "LARGE", 0)
    layer, x = nn.Linear(96, 40).cuda(), torch.randn(2, 30, 96, device="cuda")
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad(), ThreePassLinear():
        found = layer(x)
    assert found.shape == exact.shape
    assert 0 < (found - exact).norm() <= ERROR * exact.norm()
    assert not torch.equal(found, layer(x))


def test_gradients_against_float64():
    x, weight = torch.randn(30, 96, device=DEVICE), torch.randn(40, 96, device=DEVICE)
    slope = torch.randn(30, 40, device=DEVICE)
    inputs = [tensor.double().requires_grad_() for tensor in (x, weight)]
    exact = torch.autograd.grad(F.linear(*inputs), inputs, slope.double())
    inputs = [tensor.requires_grad_() for tensor in (x, weight)]
    for found, wanted in zip(torch.autograd.grad(linear_with_gradients(*inputs), inputs, slope), exact, strict=True):
        assert 0 < (found - wanted).norm() <= ERROR * wanted.norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="CPUs compute in float32: no GPU here")
@pytest.mark.parametrize("large", [True, False])
def test_a_large_linear_layer_trains_in_three_products(monkeypatch, large):
    layer, x = nn.Linear(96, 40).cuda(), torch.randn(2, 30, 96, device="cuda")
    monkeypatch.setattr(three_pass, "LARGE", 2 * 30 * 96 * 40 + (not large))
    plain = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    with ThreePassLinear():
        loss = layer(x).square().sum()
    for found, wanted in zip(torch.autograd.grad(loss, layer.parameters()), plain, strict=True):
        assert torch.equal(found, wanted) != large
        assert (found - wanted).norm() <= ERROR * wanted.norm()


def test_other_tensors_are_left_alone():
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with ThreePassLinear():
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        layer.to(DEVICE)(x.to(DEVICE)).sum().backward()
    assert layer.weight.grad is not None

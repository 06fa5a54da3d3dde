"""The Triton kernels of rounding against the columns of torch."""

import pytest
import torch

from semisparse.compress.prune import quantise, sparsegpt
from semisparse.compress.prune.quantise import ColumnQuantiser, round_by_descent
from semisparse.quant.group import scales_of

pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = 320 if DEVICE == "cuda" else 20
"""Triton's interpreter is slow."""


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a Hessian, the factor of its inverse, a weight, a mask of 60 % and the columns' units."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    x = x / x.square().mean(0).sqrt()
    hessian = x.T @ x / len(x)
    upper = sparsegpt.factorise(hessian, 0.01).upper
    weight = torch.randn(6, COLUMNS, generator=generator)
    kept = torch.rand(6, COLUMNS, generator=generator) < 0.6
    units = torch.rand(COLUMNS, generator=generator) + 0.5
    hessian.diagonal().add_(0.01)
    return tuple(tensor.to(DEVICE) for tensor in (hessian, upper, weight, kept, units))


@pytest.mark.parametrize(("bits", "size"), [(2, 8), (4, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_groups_are_rounded_as_in_torch(bits: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    _, upper, weight, kept, units = problem()
    importance = (units / upper.diagonal()).square()
    by_kernel, by_torch = (ColumnQuantiser(bits, size, units, dtype, importance) for _ in range(2))
    found = by_kernel.round_all(weight, kept, upper)
    monkeypatch.setattr(sparsegpt, "has_rounding_kernel", lambda weight: False)
    expected = sparsegpt.quantise_columns(weight, kept, upper, by_torch)
    assert (found != 0).any()
    assert torch.equal(found[~kept], torch.zeros_like(found[~kept]))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(by_kernel.scales.scale, by_torch.scales.scale, rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_descent_ends_as_in_torch(bits: int, monkeypatch: pytest.MonkeyPatch):
    hessian, _, weight, kept, units = problem(1)
    pruned, columns = weight * kept, torch.arange(COLUMNS, device=DEVICE)
    scales = scales_of(pruned / units, bits, 8, torch.float16, symmetric=True)
    monkeypatch.setattr(quantise, "BLOCK_COLUMNS", 8)
    monkeypatch.setattr(quantise, "has_rounding_kernel", lambda weight: False)
    expected = round_by_descent(pruned, kept, hessian, weight, scales, columns, units)
    monkeypatch.setattr(quantise, "has_rounding_kernel", lambda weight: True)
    found = round_by_descent(pruned, kept, hessian, weight, scales, columns, units)
    assert (found != 0).any()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)

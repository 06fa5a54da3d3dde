"""Scales that are fitted to a weighted rounding error."""

import pytest
import torch

from semisparse.quant import fit
from semisparse.quant.fit import fit_scales
from semisparse.quant.group import GroupScales, scales_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weighted_error(weight: torch.Tensor, importance: torch.Tensor, scales: GroupScales) -> torch.Tensor:
    """Return the error per row, in float64, from codes that are computed here."""
    groups = weight.double().unflatten(1, (-1, scales.size))
    zero = scales.zero.double()[..., None] / 2 ** (8 - scales.bits)
    scale = scales.scale.double()[..., None]
    codes = (groups / scale + zero).round().clamp(0, 2**scales.bits - 1)
    error = ((codes - zero) * scale - groups).square().flatten(1) * importance.double()
    return error.sum(1)


@pytest.mark.parametrize(("bits", "symmetric", "share"), [(2, False, 0.55), (3, False, 0.85), (4, True, 0.97)])
def test_the_error_is_lower_than_with_scales_that_span_the_group(bits: int, symmetric: bool, share: float):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(32, 128, generator=generator)
    importance = torch.randn(128, generator=generator).exp()
    fitted = fit_scales(weight, importance, bits, 64, torch.float32, symmetric)
    spanning = scales_of(weight, bits, 64, torch.float32, symmetric)
    before, after = (weighted_error(weight, importance, scales) for scales in (spanning, fitted))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < share * before.sum()


def test_the_error_is_near_that_of_a_fine_grid():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, generator=generator)
    importance = torch.rand(16, generator=generator) + 0.1
    fitted = weighted_error(weight, importance, fit_scales(weight, importance, 2, 16, torch.float32))
    best = torch.full((4,), torch.inf, dtype=torch.float64)
    for scale in torch.linspace(0.2, 2.5, 120):
        for zero in range(0, 256, 4):
            tried = GroupScales(2, 16, scale.expand(4, 1), torch.full((4, 1), float(zero)))
            best = torch.minimum(best, weighted_error(weight, importance, tried))
    assert (fitted < 1.25 * best).all()


def test_a_column_of_no_importance_does_not_count():
    weight = torch.tensor([[100.0, 0.1, 0.2, 0.3, 0.4, -0.1, -0.2, -0.3]])
    importance = torch.tensor([0.0, *[1.0] * 7])
    scales = fit_scales(weight, importance, 4, 8, torch.float32)
    assert scales.rounded(weight)[0, 1:].sub(weight[0, 1:]).abs().max() < 20


@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_of_zeros_and_short_groups_have_usable_scales(symmetric: bool):
    weight = torch.zeros(3, 20)
    weight[1] = torch.linspace(-1, 1, 20)
    scales = fit_scales(weight, torch.ones(20), 2, 16, torch.float16, symmetric)
    assert scales.scale.shape == (3, 2)
    assert scales.scale.isfinite().all()
    assert (scales.scale != 0).all()
    assert torch.equal(scales.rounded(weight)[0], torch.zeros(20, dtype=torch.float16))


def test_least_squares_improve_the_best_range(monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    importance = torch.ones(128)
    refitted = weighted_error(weight, importance, fit_scales(weight, importance, 2, 32, torch.float32)).sum()
    monkeypatch.setattr(fit, "REFITS", 0)
    of_ranges = weighted_error(weight, importance, fit_scales(weight, importance, 2, 32, torch.float32)).sum()
    assert refitted < 0.99 * of_ranges


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_code_dequantises_past_the_range_of_float16(symmetric: bool):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(64, 64, generator=generator) * 2 - 1) * torch.finfo(torch.float16).max
    scales = fit_scales(weight, torch.ones(64), 4, 16, torch.float16, symmetric)
    assert scales.rounded(weight).isfinite().all()


# Triton's interpreter rounds to bfloat16 in another way than GPUs and torch do.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, False), (8, False), (4, True)])
def test_the_kernel_fits_as_torch_does(bits: int, symmetric: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(9, 40, generator=generator).to(DEVICE)
    weight[3] = 0
    weight[4, 16:32] = 0
    weight[:, ::3] *= torch.rand(9, 14, generator=generator).to(DEVICE) < 0.5
    importance = torch.rand(40, generator=generator).to(DEVICE)
    importance[5] = 0
    found = {}
    for kernel in (False, True):
        monkeypatch.setattr(fit, "has_fit_kernel", lambda weight, kernel=kernel: kernel)
        found[kernel] = fit_scales(weight, importance, bits, 16, dtype, symmetric)
    ours, theirs = found[True], found[False]
    assert ours.scale.dtype == theirs.scale.dtype
    assert ours.scale.shape == theirs.scale.shape == ours.zero.shape
    whole = torch.arange(2, device=DEVICE)  # the third group is a short one
    errors = [weighted_error(weight[:, :32], importance[:32], each.select_groups(whole)) for each in (ours, theirs)]
    assert torch.allclose(*errors, rtol=1e-3, atol=1e-6)
    same = torch.isclose(ours.scale, theirs.scale, rtol=2e-3) & (ours.zero == theirs.zero)
    assert same.float().mean() > 0.8  # sums in another order may choose another range of nearly the same error

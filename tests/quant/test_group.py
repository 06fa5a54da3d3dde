"""Group quantisation against its equations in exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semisparse.quant.group import KINDS, GroupScales, fake_quantise, scales_of, stored_groups

WIDTHS = sorted(set(KINDS.values()))


def weight_of(n: int, k: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * 10.0 ** torch.arange(-2, n - 2)[:, None]


@given(
    bits=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    n=st.integers(1, 5),
    k=st.integers(1, 70),
    size=st.sampled_from([4, 16, 32]),
)
@settings(max_examples=200)
def test_the_error_is_half_a_code_and_that_of_the_zero_point(bits, dtype, n, k, size):
    weight = weight_of(n, k).to(dtype).float()
    scales = scales_of(weight, bits, size, dtype)
    assert scales.scale.dtype == dtype
    assert scales.scale.shape == scales.zero.shape == (n, math.ceil(k / size))
    step = scales.scale.double().repeat_interleave(size, 1)[:, :k]
    # A weight at an end of the range may fall outside the codes and is clamped: by half a unit of the stored zero
    # point, and by the rounding of the scale over the whole range.
    beyond = 2.0 ** (bits - 8) / 2 + torch.finfo(dtype).eps * 2**bits
    error = (scales.rounded(weight).double() - weight.double()).abs()
    stored = torch.finfo(dtype).eps * weight.double().abs() + torch.finfo(dtype).tiny
    assert (error <= (0.5 + beyond) * step + 2 * stored).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_values_are_exact_and_rounded_once(bits):
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(40, 1, generator=generator).add(0.01).half()
    zero = torch.randint(0, 256, (40, 1), generator=generator).float()
    codes = torch.randint(0, 2**bits, (40, 1, 8), generator=generator).to(torch.uint8)
    values = GroupScales(bits, 8, scale, zero).values(codes)
    for row in range(40):
        point = Fraction(int(zero[row, 0])) / 2 ** (8 - bits)
        for column in range(8):
            exact = (int(codes[row, 0, column]) - point) * Fraction(scale[row, 0].item())
            # exact in float64: 9 + 11 bits
            assert values[row, 0, column] == torch.tensor(float(exact), dtype=torch.float64).half()


def test_both_ends_of_a_group_and_zero_are_codes():
    """Equation 1: from -1 to 2 in 4 bits the scale is 0.2, and zero is code 5."""
    scales = scales_of(torch.tensor([[-1.0, 2.0, 0.0, 0.5]]), 4, 4, torch.float32)
    assert scales.scale.item() == pytest.approx(0.2)
    assert scales.zero.item() == 5 * 16
    assert scales.codes(torch.tensor([[-9.0, 9.0, 0.0, 0.61]])).tolist() == [[[0, 15, 5, 8]]]


def test_groups_on_one_side_of_zero_reach_to_zero():
    scales = scales_of(torch.tensor([[3.0, 4.5], [-3.0, -4.5]]), 4, 2, torch.float32)
    assert scales.scale.flatten().tolist() == pytest.approx([0.3, 0.3])
    assert scales.zero.flatten().tolist() == [0, 240]


def test_symmetric_codes_have_zero_in_the_middle_and_the_largest_weight_at_the_end():
    weight = torch.tensor([[-4.0, 2.0, 0.0, 0.3], [1.0, 8.0, -8.0, 0.0], [0.0] * 4])
    scales = scales_of(weight, 4, 4, torch.float16, symmetric=True)
    assert scales.scale.flatten().tolist() == [0.5, 1.0, 1.0]
    assert (scales.zero == 128).all()
    assert scales.codes(weight).flatten(1).tolist() == [[0, 12, 8, 9], [9, 15, 0, 8], [8, 8, 8, 8]]
    assert scales.rounded(weight)[:2].tolist() == [[-4, 2, 0, 0.5], [1, 7, -8, 0]]
    positive = scales_of(-weight[:1], 4, 4, torch.float32, symmetric=True)
    assert positive.scale.item() == -0.5
    torch.testing.assert_close(positive.rounded(-weight[:1]), -scales.rounded(weight)[:1].float())


@pytest.mark.parametrize("bits", [8, 4])
def test_symmetric_quantisation_keeps_single_zeros(bits):
    weight = weight_of(6, 40) * (torch.arange(40) % 3 > 0)
    scales = scales_of(weight, bits, 16, torch.float32, symmetric=True)
    faked = fake_quantise(weight, scales.scale, scales.zero, bits, 16)
    assert not faked[weight == 0].any()
    assert (faked - weight).abs().max() <= weight.abs().max() / 2 ** (bits - 1)
    torch.testing.assert_close(faked, scales.rounded(weight))


def test_groups_of_zeros_stay_zero():
    weight = torch.tensor([[1.0, -0.37, 0.0, 0.0, 0.0]])
    scales = scales_of(weight, 4, 2, torch.float32)
    assert stored_groups(weight, 2).tolist() == [[True, False, False]]
    assert scales.rounded(weight)[0, 2:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", WIDTHS)
def test_fake_quantise_rounds_as_the_scales_do(bits):
    weight = weight_of(6, 40)
    scales = scales_of(weight, bits, 16, torch.float32)
    torch.testing.assert_close(fake_quantise(weight, scales.scale, scales.zero, bits, 16), scales.rounded(weight))


def test_gradients_pass_straight_through_and_stop_outside():
    """For weights that are exactly on codes, gradients are those of w = (code - zero) * scale."""
    weight = torch.tensor([[0.4, 0.2, 99.0, -99.0]], requires_grad=True)
    scale = torch.tensor([[0.2]], requires_grad=True)
    zero = torch.tensor([[5.0 * 16]], requires_grad=True)
    fake_quantise(weight, scale, zero, 4, 4).sum().backward()
    assert weight.grad.tolist() == [[1, 1, 0, 0]]
    # Inside the range the gradient cancels; outside, those of the clamped codes 15 - 5 and 0 - 5 remain.
    assert scale.grad.item() == pytest.approx(10 - 5, abs=1e-4)
    # Inside the range code and zero point shift together; outside, a value falls by the scale per code of shift.
    assert zero.grad.item() == pytest.approx(2 * -0.2 / 16, abs=1e-6)

"""Trainable scales and zero points: their gradients, and what codes become when they change."""

import pytest
import torch
from torch import nn

from semisparse.compress.tune.quantised import add_fake_quantisation
from semisparse.quant.group import scales_of, split_groups

SIZE = 4


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gradients_are_those_of_the_values_of_fixed_codes(bits: int):
    """A gradient of rounding error alone, as that of (round(w / s) - z) * s at codes, leads scales astray."""
    generator = torch.Generator().manual_seed(bits)
    linear = nn.Linear(8, 3, bias=False)
    scales = scales_of(torch.randn(3, 8, generator=generator), bits, SIZE, torch.float32)
    linear.weight.data = scales.rounded(torch.randn(3, 8, generator=generator))
    trainable, goal = add_fake_quantisation(linear, scales), torch.randn(3, 8, generator=generator)
    weight = linear.weight.detach().clone()
    (linear.weight * goal).sum().backward()
    by_group = split_groups(weight * goal, SIZE).sum(-1)
    torch.testing.assert_close(trainable.log_factor.grad, by_group)
    torch.testing.assert_close(trainable.shift.grad, -scales.scale * split_groups(goal, SIZE).sum(-1))


def test_new_scales_do_not_change_codes():
    linear = nn.Linear(8, 3, bias=False)
    scales = scales_of(linear.weight.detach(), 3, SIZE, torch.float32)
    linear.weight.data = scales.rounded(linear.weight.data)
    codes = scales.codes(linear.weight.detach())
    trainable = add_fake_quantisation(linear, scales)
    trainable.log_factor.data += 0.4
    trainable.shift.data -= 0.25
    assert torch.equal(trainable.group_scales.codes(linear.weight.detach()), codes)

"""Trainable scales and zero points: their gradients, and what codes become when they change."""

import pytest
import torch
from torch import nn

from semisparse.compress.tune import quantised
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


@pytest.mark.parametrize(("bits", "size", "symmetric"), [(2, 16, False), (4, 24, False), (3, 8, True)])
def test_the_kernels_quantise_and_train_as_torch_does(
    bits: int, size: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'semisparse[cuda]'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(7, 40, generator=torch.Generator().manual_seed(bits))
    weight[2, :size] = 0  # a pruned group
    scales = scales_of(weight, bits, size, torch.float16, symmetric).to(torch.device(device))
    slope, found = torch.randn(7, 40, generator=torch.Generator().manual_seed(9)).to(device), []
    for kernel in (False, True):
        monkeypatch.setattr(quantised, "has_tuning_kernel", lambda weight, kernel=kernel: kernel)
        linear = nn.Linear(40, 7, bias=False).to(device)
        linear.weight.data.copy_(weight)
        trainable = add_fake_quantisation(linear, scales)
        with torch.no_grad():
            trainable.log_factor.add_(0.1)
            trainable.shift.add_(0.0 if symmetric else 0.3)
        linear.parametrizations.weight.original.data.mul_(1.2)  # some codes are clamped
        linear.weight.backward(slope)
        grads = [linear.parametrizations.weight.original.grad, trainable.log_factor.grad, trainable.shift.grad]
        found.append([linear.weight.detach(), *(grad for grad in grads if grad is not None)])
    assert len(found[0]) == len(found[1]) == (3 if symmetric else 4)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)

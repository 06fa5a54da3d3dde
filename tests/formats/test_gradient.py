"""Gradients through a packed product, against torch's own through the dense one."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from semisparse.formats import get_format, linear
from semisparse.patterns import parse_pattern


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bias", [None, torch.ones(12)])
def test_gradients_of_x_and_bias(bias: torch.Tensor | None, compiled: bool):
    torch.manual_seed(0)
    weight = torch.randn(12, 100)
    weight *= parse_pattern("32:64").mask(weight.abs())
    packed = get_format("bitmask").pack(weight, "32:64")
    inputs = [torch.randn(3, 5, 100, requires_grad=True), None if bias is None else bias.clone().requires_grad_()]
    wanted = [None if t is None else t.detach().clone().requires_grad_() for t in inputs]
    product = torch.compile(linear, backend="aot_eager") if compiled else linear
    pull = torch.randn(3, 5, 12)
    product(inputs[0], packed, inputs[1]).backward(pull)
    F.linear(wanted[0], weight, wanted[1]).backward(pull)
    for found, expected in zip(inputs, wanted, strict=True):
        if found is not None:
            # At most 100 products below 16 summed in float32 in another order.
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=100 * 16 * 2**-24)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing(reentrant: bool):
    """As in fine-tuning with `gradient_checkpointing_enable`: the forward is computed again in the backward."""
    torch.manual_seed(0)
    packed = get_format("bitmask").pack(torch.randn(12, 64) * (torch.rand(12, 64) < 0.5), "64:64")
    x, bias, pull = torch.randn(3, 64, requires_grad=True), torch.ones(12, requires_grad=True), torch.randn(3, 12)
    expected = torch.autograd.grad(linear(x, packed, bias), (x, bias), pull)
    y = checkpoint(lambda x: linear(x, packed, bias), x, use_reentrant=reentrant)
    y.backward(pull)
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(bias.grad, expected[1])


@pytest.mark.parametrize("bias", [None, torch.ones(12)])
def test_forward_mode(bias: torch.Tensor | None):
    """torch's operator alone returns a tangent of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(12, 100) * parse_pattern("32:64").mask(torch.rand(12, 100))
    packed = get_format("bitmask").pack(weight, "32:64")
    x, direction = torch.randn(3, 100), torch.randn(3, 100)
    y, tangent = torch.func.jvp(lambda x: linear(x, packed, bias), (x,), (direction,))
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tangent, direction @ weight.T, rtol=1e-4, atol=1e-4)
    if bias is not None:
        of_bias = torch.func.jvp(lambda b: linear(x, packed, b), (bias,), (2 * bias,))[1]
        assert torch.equal(of_bias, 2 * bias.expand(3, 12))


def test_the_forward_is_the_same_with_and_without_gradients():
    packed = get_format("bitmask").pack(torch.eye(64), "1:64")
    x = torch.randn(2, 64, requires_grad=True)
    with torch.no_grad():
        expected = linear(x, packed)
    assert torch.equal(linear(x, packed), expected)

"""A packed weight with a dense copy beside it."""

from __future__ import annotations

import pytest
import torch

import semisparse
from semisparse.formats import product
from semisparse.nn import CopiedLinear, StackedLinear, copy_pays, dense_copy
from semisparse.patterns import parse_pattern

K, N = 128, 24


def packed_weight(rows: int = N) -> semisparse.formats.base.Packed:
    torch.manual_seed(0)
    weight = torch.randn(rows, K)
    return semisparse.pack(weight * parse_pattern("32:64").mask(weight.abs()), format="bitmask", pattern="32:64")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {0: 4})


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(3, K), (4, K), (2, 3, K)])
def test_the_copy_and_the_packed_weight_compute_the_same(shape: tuple[int, ...], biased: bool):
    packed = packed_weight()
    x, bias = torch.randn(shape), torch.randn(N) if biased else None
    wanted = x.double() @ packed.unpack().double().T + (0 if bias is None else bias.double())
    y = CopiedLinear(packed, torch.float32)(x, bias)
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=1e-5)


def test_only_many_tokens_use_the_copy():
    layer = CopiedLinear(packed_weight(), torch.float32)
    layer.dense.data.zero_()
    assert layer(torch.randn(3, K)).any()
    assert not layer(torch.randn(4, K)).any()


@pytest.mark.filterwarnings("error")  # torch warns of an operator without a gradient of its own
def test_gradients_reach_x_and_the_bias():
    packed = packed_weight()
    for m in (3, 4):
        x, bias = torch.randn(m, K, requires_grad=True), torch.randn(N, requires_grad=True)
        wanted = torch.autograd.grad(torch.nn.functional.linear(x, packed.unpack(), bias).square().sum(), (x, bias))
        found = torch.autograd.grad(CopiedLinear(packed, torch.float32)(x, bias).square().sum(), (x, bias))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_only_the_packed_weight_is_saved():
    packed = packed_weight()
    assert CopiedLinear(packed, torch.float32).state_dict().keys() == packed.tensors.keys()


def test_the_copy_is_of_the_weight_that_is_loaded_or_set():
    layer, other, x = CopiedLinear(packed_weight(), torch.float32), packed_weight(), torch.randn(4, K)
    other.tensors["values"].mul_(2)
    once = layer(x)
    layer.load_state_dict(other.tensors)
    torch.testing.assert_close(layer(x), 2 * once, rtol=1e-5, atol=1e-5)
    layer.packed = packed_weight()
    torch.testing.assert_close(layer(x), once, rtol=1e-5, atol=1e-5)


def test_copies_of_large_weights_begin_at_more_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense_copy, "MANY_TOKENS", {N * K + 1: 9, N * K: 5, 0: 3})
    assert [
        copy_pays(packed_weight(rows), m, torch.float32) for rows in (N - 1, N, N + 1) for m in (2, 3, 4, 5, 8, 9)
    ] == [
        *(False, True, True, True, True, True),
        *(False, False, False, True, True, True),
        *(False, False, False, False, False, True),
    ]


def test_a_traced_layer_chooses_at_each_call():
    layer = CopiedLinear(packed_weight(), torch.float32)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=keep, dynamic=True)
    for m in (2, 3, 4, 9):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), layer(x))
    assert len(graphs) == 1


def test_a_stack_keeps_copies_only_of_weights_that_use_them(monkeypatch: pytest.MonkeyPatch):
    parts = [packed_weight(), packed_weight(40)]
    stacked, x = StackedLinear(parts), torch.randn(5, K)
    wanted = stacked(x)
    stacked.keep_dense(2, torch.float32)
    assert not any(isinstance(layer, CopiedLinear) for layer in stacked.layers)
    stacked.keep_dense(5, torch.float32)
    assert all(isinstance(layer, CopiedLinear) for layer in stacked.layers)
    torch.testing.assert_close(stacked(x), wanted, rtol=0, atol=1e-5)
    monkeypatch.setattr(product, "_measured_speedup", lambda *problem: 1.5)
    assert not CopiedLinear.pays(parts[0], 8192, torch.float32)

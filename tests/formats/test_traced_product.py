"""One opaque operator for every format: traces, fake tensors, and eager calls that do not go through it."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from semisparse.errors import InputError
from semisparse.formats import Format, Packed, linear, registry
from semisparse.nn import SparseLinear
from tests.formats.cases import cases_of

FORMATS = [pytest.param(form, id=name) for name, form in registry().items()]


def layer(form: Format) -> SparseLinear:
    case = cases_of(form.name)[0]
    weight = case.weight()
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(1))
    return SparseLinear(form.pack(weight, case.pattern), bias)


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_compiles_without_a_graph_break(form):
    module = layer(form)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for shape in ((1,), (5,), (2, 3)):
        x = torch.randn(*shape, module.in_features)
        assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("form", FORMATS)
def test_the_graph_holds_one_operator(form):
    module = layer(form)
    graph = torch.export.export(module, (torch.randn(2, 3, module.in_features),)).graph
    called = [node for node in graph.nodes if node.op == "call_function" and "semisparse" in str(node.target)]
    assert [str(node.target) for node in called] == ["semisparse.linear.default"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_operator_and_its_fake_agree(form):
    module = layer(form)
    packed = module.packed
    x = torch.randn(3, module.in_features)
    tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
    arguments = (x, [t.detach() for t in tensors], module.bias.detach(), packed.spec.json, "auto")
    torch.library.opcheck(torch.ops.semisparse.linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(torch.ops.semisparse.linear(*arguments), linear(x, packed, module.bias))


def test_the_fake_computes_nothing():
    packed = layer(registry()["dense"]).packed
    n, k = packed.shape
    mode = FakeTensorMode()
    tensors = [mode.from_tensor(t.detach()) for t in packed.tensors.values()]
    x = mode.from_tensor(torch.empty(7, k))
    with mode:
        y = torch.ops.semisparse.linear(x, tensors, None, packed.spec.json, "auto")
    assert y.shape == (7, n)


def test_the_order_of_the_tensors_does_not_matter():
    packed = layer(registry()["bitmask"]).packed
    reversed_order = Packed(packed.spec, dict(reversed(packed.tensors.items())))
    x = torch.randn(2, packed.shape[1])
    assert torch.equal(linear(x, reversed_order), linear(x, packed))


def test_a_cut_weight_is_another_weight_compiled_too():
    """A weight's shape is stored only in its spec, so that compiled code reads no row that is not there."""
    packed = layer(registry()["dense"]).packed
    spec = dataclasses.replace(packed.spec, shape=(4, packed.shape[1]))
    cut = Packed(spec, {name: tensor[:4] for name, tensor in packed.tensors.items()})
    x = torch.randn(2, packed.shape[1])
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, cut)
    assert compiled.shape == (2, 4)
    assert torch.equal(compiled, linear(x, cut))


def test_a_wrong_x_is_refused_while_tracing_too():
    module = layer(registry()["dense"])
    torch._dynamo.reset()
    with pytest.raises((InputError, torch._dynamo.exc.TorchDynamoException), match="features"):
        torch.compile(module, fullgraph=True, backend="eager")(torch.randn(1, module.in_features + 1))

"""Joined experts compute what separate ones do, by the emulated kernels, and keep their tensors' names and bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from semisparse.formats import get_format
from semisparse.nn import SparseExperts, SparseLinear, join_experts, join_layers, split_experts
from semisparse.nn import experts_product as experts_module
from semisparse.patterns import parse_pattern
from tests.cuda_emulator import emulate, needs_compiler
from tests.nn.test_sparse_experts import arguments, model_with_experts

HALF = torch.float16
GQS = get_format("gqs")
ROUTED = ("Mixtral", "GPT-OSS", "DeepSeek-V3")
"""SiLU; biases and an activation of its own; many experts."""


def packed_experts(
    kind: str, dtype: torch.dtype = HALF, form: str = "gqs", pattern: str = "g16@50%"
) -> tuple[nn.Module, SparseExperts]:
    """Return a tiny model whose experts are packed, and those of one layer."""
    model = model_with_experts(kind, dtype)
    split_experts(model)
    packed_as = parse_pattern(pattern)
    for module in [module for module in model.modules() if isinstance(module, SparseExperts)]:
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear):
                weight = layer.weight.detach()
                packed = get_format(form).pack(weight * packed_as.mask(weight.abs()), packed_as)
                module.set_submodule(name, SparseLinear(packed, layer.bias))
    return model, next(module for module in model.modules() if isinstance(module, SparseExperts))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the CPU pass for a GPU; what was prepared for it is forgotten afterwards."""
    emulate(monkeypatch)
    monkeypatch.setattr("semisparse.runtime.kernel.unavailable", lambda: None)
    yield
    experts_module._prepared.cache_clear()


def operands(experts: SparseExperts) -> list[Any]:
    x, chosen, weights = arguments(_Like(experts), skipped=1, dtype=HALF)
    return [x, chosen, weights]


class _Like:
    """A module whose forward takes routing, as `arguments` looks at it."""

    def __init__(self, experts: SparseExperts) -> None:
        self.num_experts = experts.num_experts

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("kind", ROUTED)
def test_joined_experts_compute_the_same(gpu, kind: str):
    _, experts = packed_experts(kind)
    given = operands(experts)
    before, saved = experts(*given), {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    assert join_experts(experts) == ["joined"]
    after = experts(*given)
    assert (after - before).norm() <= 2e-3 * before.norm()
    assert torch.equal(after, experts(*given))
    assert experts.joined._epilogue == ("none" if kind == "GPT-OSS" else "silu_mul")
    now = experts.state_dict()
    assert set(now) == set(saved)
    assert all(torch.equal(now[name], saved[name]) for name in saved)
    assert join_experts(experts) == []
    assert torch.equal(experts(given[0][:0], given[1][:0], given[2][:0]), given[0][:0])


@needs_compiler
@torch.no_grad()
def test_joined_experts_that_are_divided_add_up_to_all(gpu):
    """As on two ranks: each joins the experts that it holds, and is given the numbers of all."""
    parts = [packed_experts("DeepSeek-V3")[1] for _ in range(3)]
    whole, (low, high) = parts[0], parts[1:]
    given, half = operands(whole), whole.num_experts // 2
    low.hold(range(half))
    high.hold(range(half, whole.num_experts))
    expected = whole(*given)
    for part in (low, high):
        assert join_experts(part) == ["joined"]
    total = low(*given) + high(*given)
    assert (total - expected).norm() <= 2e-3 * expected.norm()


@needs_compiler
def test_gradients_reach_x_through_joined_experts(gpu):
    _, experts = packed_experts("Mixtral")
    x, chosen, weights = operands(experts)
    x.requires_grad_()
    (separate,) = torch.autograd.grad(experts(x, chosen, weights).float().sum(), x)
    join_experts(experts)
    (joined,) = torch.autograd.grad(experts(x, chosen, weights).float().sum(), x)
    assert (joined - separate).norm() <= 1e-2 * separate.norm()


@needs_compiler
@torch.no_grad()
def test_joining_a_model_joins_its_experts(gpu):
    model, _ = packed_experts("Mixtral")
    tokens = torch.arange(12).view(2, 6)
    before = model(tokens).logits
    name, _ = next((n, m) for n, m in model.named_modules() if isinstance(m, SparseExperts))
    assert f"{name}.joined" in join_layers(model)
    after = model(tokens).logits
    assert (after - before).norm() <= 5e-3 * before.norm()


def test_what_stays_apart(gpu):
    """One expert of another pattern, one with a hook, routing that is no argument, weights that no kernel takes."""
    _, other = packed_experts("Mixtral")
    weight = other.get_submodule("1.down").weight
    other.set_submodule("1.down", SparseLinear(GQS.pack(weight, "g16@0%", kind="w4")))
    _, hooked = packed_experts("Mixtral")
    hooked.get_submodule("0.gate_up").register_forward_hook(lambda *a: None)
    _, unrouted = packed_experts("Llama-4 text")
    _, wide = packed_experts("Mixtral", torch.float32)
    for experts in (other, hooked, unrouted, wide):
        assert join_experts(experts) == []
        assert experts.joined is None


def test_experts_on_a_cpu_stay_apart():
    _, experts = packed_experts("Mixtral")
    assert join_experts(experts) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="joined experts on a GPU: no GPU here")
@torch.no_grad()
@pytest.mark.parametrize(("form", "pattern"), [("bitmask", "32:64"), ("gqs", "g16@50%")])
@pytest.mark.parametrize("kind", ROUTED)
def test_a_model_on_a_gpu(kind: str, form: str, pattern: str):
    """Decode steps and a prompt; the experts can be captured, and saved as they were."""
    model, experts = packed_experts(kind, torch.bfloat16, form, pattern)
    model.to("cuda")
    saved = {name: tensor.cpu() for name, tensor in experts.state_dict().items()}
    prompts = [torch.arange(n, device="cuda").view(1, n) % 64 for n in (1, 7, 40)]
    before = [model(tokens, use_cache=False).logits.float() for tokens in prompts]
    assert join_experts(model)
    for tokens, expected in zip(prompts, before, strict=True):
        logits = model(tokens, use_cache=False).logits.float()
        assert (logits - expected).norm() <= 3e-2 * expected.norm()
    now = experts.state_dict()
    assert all(torch.equal(now[name].cpu(), tensor) for name, tensor in saved.items())
    given = [operand.cuda() for operand in operands(experts)]
    given = [given[0].bfloat16(), given[1], given[2].bfloat16()]
    graph, expected = torch.cuda.CUDAGraph(), experts(*given)
    with torch.cuda.graph(graph):
        y = experts(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)

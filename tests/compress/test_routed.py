"""Each expert's statistics are those of the tokens routed to it; of all tokens where these are few."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from semisparse.compress import Recipe, compress_decoder_layers, routed
from semisparse.compress.decoder import LayerCall
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.propagate import first_activations, linears_with_statistics
from semisparse.compress.prune import Statistics
from semisparse.compress.trace import RoutedLayers, expert_of, find_inputs
from semisparse.nn import split_experts, weight_of
from tests.architectures import tiny_model

RECIPE = Recipe(pattern="2:4", prune="sparsegpt")
CPU = torch.device("cpu")
BATCHES = [torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def statistics_of(model: nn.Module, change: float = 1.0) -> tuple[dict[str, Statistics], nn.Module]:
    """Return the statistics of the first decoder layer's linear layers, and the layer as changed.

    Every weight is multiplied by ``change`` once its statistics are known, as pruning changes it.
    """
    layers = list_decoder_layers(model, RECIPE, {})
    activations = first_activations(model, layers, BATCHES, RECIPE, CPU, ranks=Ranks(), offload=None, shared=True)
    dense, working = layers[0].copy(CPU), layers[0].copy(CPU)
    found = {}
    with torch.no_grad():
        for alike in linears_with_statistics(layers[0], dense, working, activations, 0):
            for linear in alike:
                found[linear.name] = linear.statistics()
                linear.weight.mul_(change)
    return found, working


def routed_tokens(layer: nn.Module, model: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens [tokens, K] that reach the first decoder layer's experts, and the experts chosen for each."""
    seen = []
    handle = layer.mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args[:2]))
    original = model.model.layers[0]
    model.model.layers[0] = layer
    with torch.no_grad():
        for ids in BATCHES:
            model(ids, use_cache=False)
    model.model.layers[0] = original
    handle.remove()
    return torch.cat([x for x, _ in seen]), torch.cat([chosen for _, chosen in seen])


@pytest.mark.parametrize("change", [1.0, 0.7])
def test_statistics_are_of_the_tokens_routed_to_an_expert(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "ENOUGH", 0.0)
    model: Any = tiny_model("Mixtral")
    split_experts(model)
    found, working = statistics_of(model, change)
    x, chosen = routed_tokens(working, model)
    seen = set()
    for index in range(4):
        expert = working.mlp.experts.expert(index)
        tokens = x[(chosen == index).any(dim=-1)]
        seen.add(len(tokens))
        inner = expert.gating(tokens @ expert.gate_up.weight.T)  # the weight as changed
        for name, inputs in {"gate_up": tokens, "down": inner}.items():
            statistics = found[f"mlp.experts.{index}.{name}"]
            torch.testing.assert_close(statistics.hessian, inputs.T @ inputs / len(tokens), rtol=1e-4, atol=1e-5)
            assert statistics.note == f"on {len(tokens)} tokens routed to it"
    assert len(seen) > 1


def test_too_few_tokens_give_the_statistics_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("Mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[2] *= 0  # its logit is 0, which is seldom among the two largest of four
        model.model.layers[0].mlp.gate.weight[3] = -model.model.layers[0].mlp.gate.weight[0]
    split_experts(model)
    _, working = statistics_of(model, 0.7)
    x, chosen = routed_tokens(working, model)
    counts = [int((chosen == index).sum()) for index in range(4)]
    monkeypatch.setattr(routed, "ENOUGH", (sorted(counts)[0] + 1) / 32)
    few = counts.index(min(counts))
    found, working = statistics_of(model, 0.7)
    expert = working.mlp.experts.expert(few)
    inner = expert.gating(x @ expert.gate_up.weight.T)
    for name, inputs in {"gate_up": x, "down": inner}.items():
        statistics = found[f"mlp.experts.{few}.{name}"]
        torch.testing.assert_close(statistics.hessian, inputs.T @ inputs / len(x), rtol=1e-4, atol=1e-5)
        assert statistics.note == f"on all tokens, {counts[few]} were routed to it"
    others = [name for name in found if not found[name].note.startswith("on all tokens")]
    assert f"mlp.experts.{counts.index(max(counts))}.gate_up" in others


def test_one_expert_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("OLMoE")
    split_experts(model)
    together, _ = statistics_of(model)
    monkeypatch.setattr(routed, "PASS_BYTES", 1)
    apart, _ = statistics_of(model)
    assert together.keys() == apart.keys()
    for name, statistics in together.items():
        assert torch.equal(statistics.hessian, apart[name].hessian), name


def test_llama_4_routes_by_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are called with every token; tokens that are not routed to an expert are zero there."""
    monkeypatch.setattr(routed, "ENOUGH", 100.0)
    model: Any = tiny_model("Llama-4 text")
    split_experts(model)
    found, _ = statistics_of(model)
    notes = [found[f"feed_forward.experts.{index}.gate_up"].note for index in range(4)]
    routed_to = [int(note.split()[3]) for note in notes]
    assert sum(routed_to) == sum(ids.numel() for ids in BATCHES)
    seen: list[Tensor] = []
    handle = model.model.layers[0].feed_forward.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for ids in BATCHES:
            model(ids, use_cache=False)
    handle.remove()
    x = torch.cat(seen)
    x = x[x.any(dim=-1)]
    assert len(x) == sum(routed_to)
    for index in range(4):
        hessian = found[f"feed_forward.experts.{index}.gate_up"].hessian
        torch.testing.assert_close(hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-6)


class Mixture(nn.Module):
    """A decoder layer with experts in a list: the first for tokens whose first feature is positive, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.block = nn.Module()
        self.block.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in "abc")
        self.block.forward = self.route

    def route(self, x: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for feature, expert in enumerate(self.block.experts):
            chosen = x[..., feature] > 5 * feature  # the last is never called
            if chosen.any():
                output[chosen] += expert(x[chosen])
        return output

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.before(x))


def test_experts_in_a_list() -> None:
    torch.manual_seed(0)
    layer, hidden, call = Mixture(), torch.randn(2, 30, 8), LayerCall((), {}, None)
    names = {name: f"m.{name}" for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    first, gate, down = find_inputs(layer, names, call, hidden)
    assert first.linears == ("before",)
    assert gate == RoutedLayers(tuple(f"block.experts.{index}.0" for index in range(3)))
    assert down == RoutedLayers(tuple(f"block.experts.{index}.2" for index in range(3)))
    alone, every = Ranks(parts=1), {0: range(1)}
    [alike] = routed.routed_statistics(layer, gate.linears, [call], [hidden], alone, every)
    found = {linear.name: linear.statistics() for linear in alike}
    x = layer.before(hidden).flatten(0, 1)
    chosen = x[x[:, 0] > 0]
    torch.testing.assert_close(found["block.experts.0.0"].hessian, chosen.T @ chosen / len(chosen))
    torch.testing.assert_close(found["block.experts.2.0"].hessian, x.T @ x / len(x))
    assert found["block.experts.2.0"].note == "on all tokens, 0 were routed to it"


@pytest.mark.parametrize(
    ("name", "expert"),
    [("mlp.experts.3.down", "mlp.experts.3"), ("a.0.experts.11.b.c", "a.0.experts.11"), ("mlp.up", None), ("0", None)],
)
def test_the_expert_of_a_layer(name: str, expert: str | None) -> None:
    assert expert_of(name) == expert


def test_every_expert_is_pruned_and_tuned() -> None:
    model = tiny_model("Qwen3-MoE")
    split_experts(model)
    recipe = Recipe(pattern="g4@50%", prune="sparsegpt", quant="w4", tune="bqpo", tune_epochs=1, format="gqs")
    reports = compress_decoder_layers(model, BATCHES, recipe)
    experts = [report for report in reports if ".experts." in report.name]
    assert len(experts) == 2 * 4 * 2
    for report in experts:
        assert 0 < report.density <= 0.51
        assert report.scales is not None
        assert weight_of(model.get_submodule(report.name)).count_nonzero()

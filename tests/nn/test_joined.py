"""Joined layers against the same layers not joined, whatever the caller does between the calls."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from semisparse.errors import InputError
from semisparse.formats import registry
from semisparse.formats.base import Packed, get_format
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import JoinedLinear, SparseLinear, join_layers
from semisparse.nn.stacking import row_offsets, stack_with_padding, unstack
from semisparse.patterns import parse_pattern
from tests.formats.cases import build, random
from tests.serving import Served, every_format, write

K = 172
NAMES = ("q_proj", "k_proj", "v_proj")
ROWS = (50, 33, 7)
JOIN = {
    "bitmask": ("32:64", {}),
    "dense": ("0%", {}),
    "ec_csr": ("70%", {}),
    "gqs": ("g16@50%", {"kind": "w4"}),
    "slide24": ("6:8", {"kind": "int8"}),
    "vector_nm": ("8:32v32", {}),
}
FILE = "model.safetensors"
FORMATS = pytest.mark.parametrize("form", sorted(registry()))
ONE_OF_EACH = pytest.mark.parametrize("served", {s.format: s for s in every_format()}.values(), ids=lambda s: s.format)


def packed(form: str, n: int, seed: int = 0, k: int = K) -> Packed:
    pattern, options = JOIN[form]
    weight = build(parse_pattern(pattern), lambda scores: random(scores).roll(seed, 0), n, k)
    return get_format(form).pack(weight, pattern, **options)


class Attention(nn.Module):
    """The projections of an attention layer. `forward` calls them as transformers does."""

    def __init__(self, form: str = "bitmask", bias: bool = True, rows: tuple[int, ...] = ROWS) -> None:
        super().__init__()
        for seed, (name, n) in enumerate(zip(NAMES, rows, strict=True)):
            self.add_module(name, SparseLinear(packed(form, n, seed), torch.randn(n) if bias else None))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def pair(**options) -> tuple[Attention, Attention]:
    """The same layers, not joined and joined."""
    apart = Attention(**options)
    joined = copy.deepcopy(apart)
    assert join_layers(joined) == ["q_proj_k_proj_v_proj"]
    return apart, joined


def test_a_layer_is_freed_once_it_is_joined(monkeypatch: pytest.MonkeyPatch):
    model = nn.ModuleList(Attention() for _ in range(4))
    layers = [[weakref.ref(layer) for layer in part.children()] for part in model]
    alive: list[int] = []

    def watched(weights: list[Packed]) -> Packed | None:
        gc.collect()
        alive.append(sum(layer() is not None for part in layers for layer in part))
        return stack_with_padding(weights)

    monkeypatch.setattr("semisparse.nn.joined.stack_with_padding", watched)
    join_layers(model)
    assert alive == [12, 9, 6, 3]


def joined_of(model: nn.Module) -> JoinedLinear:
    (joined,) = (module for module in model.modules() if isinstance(module, JoinedLinear))
    return joined


def count_matmuls(joined: Attention, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    forward = JoinedLinear.forward
    monkeypatch.setattr(JoinedLinear, "forward", lambda self, x: calls.append(1) or forward(self, x))
    return calls


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@FORMATS
@torch.no_grad()
def test_one_matmul_gives_what_three_give(form, bias, monkeypatch):
    apart, joined = pair(form=form, bias=bias)
    calls = count_matmuls(joined, monkeypatch)
    for shape in ((1, K), (5, K), (2, 3, K)):
        x = torch.randn(shape)
        assert_same(joined(x), apart(x))
    assert len(calls) == 3
    joined_of(joined).validate()
    assert joined_of(joined)._cached is None


@FORMATS
def test_a_state_dict_stays_what_it_was(form):
    apart, joined = pair(form=form)
    before, after = apart.state_dict(), joined.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
        assert after[name].untyped_storage().nbytes() == after[name].nbytes, name
    assert torch.equal(joined.k_proj.weight, apart.k_proj.weight)
    assert torch.equal(joined.k_proj.bias, apart.k_proj.bias)


@pytest.mark.parametrize("form", ["bitmask", "ec_csr", "gqs", "vector_nm"])
@settings(max_examples=20)
@given(rows=st.lists(st.integers(1, 70), min_size=2, max_size=4), k=st.integers(1, 150))
def test_weights_stack_and_unstack(form, rows, k):
    weights = [packed(form, n, seed, k) for seed, n in enumerate(rows)]
    whole = stack_with_padding(weights)
    assert whole is not None
    get_format(form).validate(whole)
    dense = whole.unpack()
    for start, weight in zip(row_offsets([weight.spec for weight in weights]), weights, strict=False):
        rows_there = dense[start : start + weight.shape[0]]
        assert torch.equal(rows_there, weight.unpack())
        dense[start : start + weight.shape[0]] = 0
    assert not dense.any()
    for part, weight in zip(unstack(whole, [weight.spec for weight in weights]), weights, strict=True):
        assert part.spec == weight.spec
        assert all(torch.equal(part.tensors[name], tensor) for name, tensor in weight.tensors.items())


def written(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    q = module.q_proj(x)
    x.view(-1).add_(1)
    return q, module.k_proj(x), module.v_proj(x)


def another(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    return module.q_proj(x), module.k_proj(x + 1), module.v_proj(x)


def twice(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    q = module.q_proj(x)
    q.mul_(2)
    return q, module.q_proj(x), module.k_proj(x), module.v_proj(x)


def alone(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    first = module.v_proj(x)
    return first, *(module.v_proj(x + i) for i in range(2)), module.k_proj(x)


def backwards(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    return module.v_proj(x), module.k_proj(x), module.q_proj(x)


def after_an_exception(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
    q = module.q_proj(x)
    with pytest.raises(InputError):
        module.k_proj(x[..., 1:])
    return q, module.k_proj(x), module.v_proj(x)


HABITS = pytest.mark.parametrize("habit", [written, another, twice, alone, backwards])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("habit", [written, another, twice, alone, backwards, after_an_exception])
def test_what_a_caller_does_between_layers_changes_no_result(habit, mode):
    apart, joined = pair()
    with mode():
        for _ in range(2):
            x = torch.randn(3, K)
            assert_same(habit(joined, x.clone()), habit(apart, x.clone()))


@pytest.mark.parametrize(
    "habit",
    [written, *(pytest.param(habit, marks=pytest.mark.slow) for habit in (another, twice, alone, backwards))],
)
def test_nor_does_it_where_the_model_is_compiled(habit):
    apart, joined = pair()
    torch._dynamo.reset()
    compiled = torch.compile(habit, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                x = torch.randn(3, K)
                assert_same(compiled(joined, x.clone()), habit(apart, x.clone()))


def test_nor_does_a_break_of_the_graph():
    apart, joined = pair()

    def broken(module: Attention, x: Tensor) -> tuple[Tensor, ...]:
        q = module.q_proj(x)
        torch._dynamo.graph_break()
        x.add_(1)
        return q, module.k_proj(x), module.v_proj(x)

    torch._dynamo.reset()
    compiled = torch.compile(broken, backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, K)
            assert_same(compiled(joined, x.clone()), broken(apart, x.clone()))


def test_gradients_reach_the_input():
    apart, joined = pair()
    grads = []
    for module in (apart, joined):
        x = torch.linspace(-1, 1, 2 * K).view(2, K).requires_grad_()
        with torch.no_grad():
            q = module.q_proj(x)
        k = module.k_proj(x)
        (q.sum() + k.square().sum() + module.v_proj(x).sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_compiled_step_holds_one_matmul_and_is_compiled_once():
    apart, joined = pair()
    matmuls: list[int] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        matmuls.append(sum("semisparse" in str(node.target) for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: joined(x * 2), fullgraph=True, backend=keep)
    for _ in range(3):
        x = torch.randn(2, K)
        assert_same(compiled(x), apart(x * 2))
    assert matmuls == [1]
    assert joined_of(joined)._cached is None


@torch.no_grad()
def test_copies_have_no_cached_output_and_are_whole():
    apart, joined = pair()
    x = torch.randn(2, K)
    joined.q_proj(x)
    for other in (copy.deepcopy(joined), pickle.loads(pickle.dumps(joined))):
        assert joined_of(other)._cached is None
        assert joined_of(other) is other.q_proj._whole is not joined_of(joined)
        assert_same(other(x), apart(x))
    assert joined.to("cpu") is joined
    assert joined_of(joined)._cached is None


def test_a_joined_model_loads_no_state():
    apart, joined = pair()
    with pytest.raises(InputError, match="load it first, then call join_layers"):
        joined.load_state_dict(apart.state_dict())
    assert "rows 50 to 83 of a joined matmul of 90" in repr(joined)


def lay_a_hook(module: Attention) -> None:
    module.k_proj.register_forward_hook(lambda *_: None)


def wrap(module: Attention) -> None:
    module.v_proj.forward = module.v_proj.forward


def drop_a_bias(module: Attention) -> None:
    module.q_proj.bias = None


def another_pattern(module: Attention) -> None:
    module.q_proj = SparseLinear(get_format("bitmask").pack(packed("bitmask", 50).unpack(), "48:64"), torch.zeros(50))


def another_kernel(module: Attention) -> None:
    module.q_proj.kernel = "reference"


def one_layer_twice(module: Attention) -> None:
    module.v_proj = module.k_proj


def nowhere(module: Attention) -> None:
    module.to("meta")


@pytest.mark.parametrize(
    "change", [lay_a_hook, wrap, drop_a_bias, another_pattern, another_kernel, one_layer_twice, nowhere]
)
def test_what_is_not_alike_stays_apart(change):
    module = Attention()
    change(module)
    before = module.q_proj, module.k_proj, module.v_proj
    assert join_layers(module) == []
    assert (module.q_proj, module.k_proj, module.v_proj) == before


@ONE_OF_EACH
def test_a_joined_model_generates_and_saves_what_it_did(served: Served, tmp_path):
    path = write(served, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(1, 250, (2, 6), generator=torch.Generator().manual_seed(0))
    greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6}
    before, parameters = model.generate(ids, **greedy), sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "apart")
    assert "model.layers.0.self_attn.q_proj_k_proj_v_proj" in join_layers(model)
    assert not any(name.split(".")[-1] in NAMES for name in sparse_layers(model))
    assert sum(p.nbytes for p in model.parameters()) <= 1.2 * parameters
    assert torch.equal(model.generate(ids, **greedy), before)
    assert torch.equal(model.generate(ids, cache_implementation="static", **greedy), before)
    model.save_pretrained(tmp_path / "joined")
    assert (tmp_path / "joined" / FILE).read_bytes() == (tmp_path / "apart" / FILE).read_bytes()

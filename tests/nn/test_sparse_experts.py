"""Experts with linear layers of their own compute what transformers' eager experts compute."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, NemotronHConfig

from semisparse.errors import InputError
from semisparse.nn import SparseExperts, split_experts
from tests.architectures import tiny_model

KINDS = ("Mixtral", "GPT-OSS", "DeepSeek-V3", "Granite-MoE", "Llama-4 text", "Nemotron-H")
"""Plain; transposed, interleaved and with biases; many; another block; sorted tokens; without a gate."""


def model_with_experts(kind: str, dtype: torch.dtype) -> Any:
    if kind != "Nemotron-H":
        return tiny_model(kind, dtype)
    config = NemotronHConfig(
        vocab_size=64,
        hidden_size=32,
        layer_types=["moe"],
        num_hidden_layers=1,
        num_attention_heads=4,
        n_routed_experts=4,
        moe_intermediate_size=16,
        mamba_num_heads=2,
        mamba_head_dim=32,
        ssm_state_size=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def experts_of(model: nn.Module) -> tuple[str, Any]:
    return next((name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Experts"))


def arguments(module: Any, skipped: int, dtype: torch.dtype) -> list[Tensor]:
    """Tokens and their routing, with no token for one expert."""
    generator = torch.Generator().manual_seed(1)
    count = module.num_experts
    scores = torch.rand(9, count, generator=generator)
    scores[:, skipped] = -1
    weights, chosen = scores.topk(2)
    x = torch.randn(9, 32, generator=generator).to(dtype)
    if len(inspect.signature(inspect.unwrap(type(module).forward)).parameters) == 4:
        return [x, chosen, weights.to(dtype)]
    mask = torch.zeros(9, count).scatter(1, chosen, weights)  # as Llama 4: routing weights of all experts
    return [(x.repeat(count, 1) * mask.T.reshape(-1, 1)).to(dtype)]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_are_divided_add_up_to_all(kind: str) -> None:
    model = model_with_experts(kind, torch.float32)
    _, original = experts_of(model)
    experts, given = SparseExperts(original), arguments(original, skipped=1, dtype=torch.float32)
    whole, total = experts(*given), 0
    half = experts.num_experts // 2
    for held in (range(half), range(half, experts.num_experts)):
        part = copy.deepcopy(experts)
        part.hold(held)
        on_meta = {int(name.split(".")[0]) for name, weight in part.named_parameters() if weight.is_meta}
        assert on_meta == set(range(experts.num_experts)) - set(held)
        assert [name for name, _ in part.named_parameters()] == [name for name, _ in experts.named_parameters()]
        total = total + part(*given)
        with pytest.raises(InputError, match="divided over processes"):
            part.fuse_into(copy.deepcopy(original), torch.float32)
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_compute_the_same(kind: str, dtype: torch.dtype) -> None:
    model = model_with_experts(kind, dtype)
    name, original = experts_of(model)
    original = copy.deepcopy(original)
    assert name in split_experts(model)
    experts = model.get_submodule(name)
    assert isinstance(experts, SparseExperts)
    for skipped in range(original.num_experts):
        given = arguments(original, skipped, dtype)
        expected = inspect.unwrap(type(original).forward)(original, *given)
        roundoff = torch.finfo(dtype).eps  # relative to the largest output: a token's outputs may cancel
        bound = 4 * roundoff * expected.abs().max().item()
        torch.testing.assert_close(experts(*given), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_again_they_are_the_same_bits(kind: str) -> None:
    model = model_with_experts(kind, torch.bfloat16)
    name, original = experts_of(model)
    state = {key: value.clone() for key, value in original.state_dict().items()}
    split_experts(model)
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    fused = model.get_submodule(name).fuse_into(skeleton.get_submodule(name), torch.bfloat16)
    assert state.keys() == fused.state_dict().keys()
    for key, value in fused.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_an_expert_of_another_rank_is_skipped() -> None:
    model = tiny_model("Mixtral")
    name, _ = experts_of(model)
    split_experts(model)
    x, weights = torch.randn(3, 32), torch.ones(3, 1)
    assert not model.get_submodule(name)(x, torch.full((3, 1), 4), weights).any()


def test_weights_share_memory_until_they_are_replaced() -> None:
    model = tiny_model("Mixtral")
    name, original = experts_of(model)
    fused = original.gate_up_proj
    split_experts(model)
    assert model.get_submodule(f"{name}.1.gate_up").weight.data_ptr() == fused[1].data_ptr()


class Doubled(nn.Module):
    """Has the parameters of experts, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 16))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return 2 * hidden


class WithNorm(Doubled):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)


class OtherArguments(Doubled):
    def forward(self, hidden: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        return hidden


@pytest.mark.parametrize("kind", [Doubled, WithNorm, OtherArguments])
def test_what_computes_something_else_is_left(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"experts": kind()})
    assert split_experts(model) == []
    assert type(model["experts"]) is kind


def test_experts_can_be_kept() -> None:
    model = tiny_model("Mixtral")
    names = split_experts(model, keep=lambda name: ".0." in name)
    assert names == ["model.layers.1.mlp.experts"]

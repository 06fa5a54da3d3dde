"""Packed experts in the real vLLM package, on a CPU and one rank, beside the transformers path."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from semisparse.checkpoint import read_block
from semisparse.errors import CheckpointError, InputError, KernelError
from semisparse.nn import split_experts
from tests.models import byte_tokenizer
from tests.serving import SIZES, Served, one, searched, write_compressed
from tests.vllm import ranks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving sets it up")

from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

needs_loader = pytest.mark.skipif(
    not hasattr(MoERunner, "load_weights"), reason="models of this vLLM ignore tensors of unknown names"
)

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("group")]

EXPERTS, TOP_K = 4, 2
TINY: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 192}
MODELS: dict[str, tuple[str, PreTrainedConfig]] = {
    "mixtral": (
        "model.layers.0.block_sparse_moe",
        MixtralConfig(
            **{**TINY, "architectures": ["MixtralForCausalLM"]}, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
        ),
    ),
    "qwen3-moe": (
        "model.layers.0.mlp",
        Qwen3MoeConfig(
            **{**TINY, "architectures": ["Qwen3MoeForCausalLM"]},
            moe_intermediate_size=64,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            head_dim=32,
        ),
    ),
}
"""Each model's block of experts in vLLM, and its config."""

FORMATS = {
    "bitmask": Served("bitmask", "bitmask", one("32:64")),
    "gqs": Served("gqs", "gqs", one("g16@50%"), {"kind": "w4"}),
    "slide24": Served("slide24", "slide24", one("6:8")),
    "vector_nm": Served("vector_nm", "vector_nm", one("16:32v32")),
}


def written(name: str, served: Served, folder: Path) -> Path:
    """A tiny model with random weights, its experts packed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name][1], dtype=torch.bfloat16).eval()
    split_experts(model)
    return write_compressed(model, byte_tokenizer(), served, folder / "model")


def experts_of(model: Any, name: str) -> Any:
    return model.get_submodule(f"{MODELS[name][0]}.experts.routed_experts")


def routing_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K]
    return chosen.int(), torch.rand(tokens, TOP_K)


@torch.no_grad()
@pytest.mark.parametrize("served", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_experts_compute_what_they_do_in_transformers(name: str, served: str, tmp_path: Path):
    directory = written(name, FORMATS[served], tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model.layers[0].mlp.experts
    experts = experts_of(ranks.load(directory), name)
    for tokens in (1, 7):
        x, (chosen, weights) = torch.randn(tokens, 128), routing_of(tokens)
        y = experts.forward_modular(x, weights, chosen)
        wanted = expected(x, chosen.long(), weights)
        # Codes are dequantised to bfloat16 here, and inside gqs' CPU kernel, which transformers runs, not rounded.
        limit = 2**-8 if FORMATS[served].options else 1e-6
        assert (y - wanted).norm() <= limit * wanted.norm()


@torch.no_grad()
def test_tensors_are_loaded_by_the_names_of_parameters(tmp_path: Path):
    """As models of vLLM 0.24 load them; with that version all tests of this file do."""
    from semisparse.integrations.vllm.experts import SemisparseExpertsMethod
    from semisparse.integrations.vllm.experts_runner import add_parameters

    directory, prefix = written("qwen3-moe", FORMATS["bitmask"], tmp_path), "model.layers.0.mlp.experts."
    block = read_block(json.loads((directory / "config.json").read_text())["quantization_config"])
    layers = {name.removeprefix(prefix): packed for name, packed in block.items() if name.startswith(prefix)}
    layer, runner = torch.nn.Module(), torch.nn.Module()
    layer.layer_name, layer.global_num_experts = prefix, EXPERTS
    layer.moe_config = SimpleNamespace(experts_per_token=TOP_K, in_dtype=torch.float32)
    method = SemisparseExpertsMethod(layer, layers, 8)
    add_parameters(runner, method)
    parameters = dict(runner.named_parameters())
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.startswith(prefix):
            parameter = parameters[name.removeprefix(prefix)]
            parameter.weight_loader(parameter, tensor)
    method.process_weights_after_loading(layer)
    assert not list(runner.parameters())
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model.layers[0].mlp.experts
    x, (chosen, weights) = torch.randn(7, 128), routing_of(7)
    wanted = expected(x, chosen.long(), weights)
    assert (method.apply(layer, x, weights, chosen) - wanted).norm() <= 1e-6 * wanted.norm()


def test_experts_of_two_patterns_are_refused(tmp_path: Path):
    directory = written("qwen3-moe", Served("searched", "bitmask", searched), tmp_path)
    with pytest.raises(
        KernelError, match=r"model\.layers\.0\.mlp\.experts cannot be computed together: .* ignore list"
    ):
        ranks.load(directory)


def test_experts_of_which_one_is_dense_are_refused(tmp_path: Path):
    directory = written("qwen3-moe", Served("partly", "bitmask", one("32:64"), dense=("experts.2.down",)), tmp_path)
    with pytest.raises(InputError, match=r"of the experts .*experts, 2\.down is not compressed but others are"):
        ranks.load(directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors, key: tensors[key][5].bitwise_xor_(1), r"experts\.1\.gate_up: tensor masks"),
        (lambda tensors, key: tensors.pop(key), r"experts\.1\.gate_up: the checkpoint lacks tensors masks"),
        pytest.param(
            lambda tensors, key: tensors.update({key.replace("masks", "other"): tensors[key].clone()}),
            r"experts\.1\.gate_up\.other: the compressed experts have no such tensor",
            marks=needs_loader,
        ),
    ],
    ids=["a bit", "a tensor", "an unknown tensor"],
)
def test_corrupted_experts_are_refused(change, sentence: str, tmp_path: Path):
    directory = written("qwen3-moe", FORMATS["bitmask"], tmp_path)
    tensors = load_file(directory / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.1.gate_up.masks")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=sentence):
        ranks.load(directory)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tp_size": 2}, "packed experts are served on one GPU"),
        ({"use_ep": True}, "packed experts are served on one GPU"),
        ({"has_bias": True}, "without biases"),
        ({"activation": None}, "the activation silu"),
        ({"apply_router_weight_on_input": True}, "weighted after it"),
    ],
)
def test_other_experts_are_refused(change: dict[str, Any], reason: str):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from semisparse.integrations.vllm.experts import refusal

    facts = {
        **{"tp_size": 1, "use_ep": False, "dp_size": 1, "has_bias": False},
        **{"activation": MoEActivation.SILU, "apply_router_weight_on_input": False},
    }

    def layer(facts: dict[str, Any]) -> SimpleNamespace:
        named = SimpleNamespace(**facts)
        named.moe_config = SimpleNamespace(**facts, moe_parallel_config=named)
        return named

    assert refusal(layer(facts)) is None
    assert reason in str(refusal(layer({**facts, **change})))


def test_a_vllm_that_loads_experts_by_its_own_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from semisparse.integrations.vllm import experts

    directory = written("qwen3-moe", FORMATS["bitmask"], tmp_path)
    monkeypatch.setattr(experts, "loads_any_name", lambda: False)
    with pytest.raises(InputError, match=r"experts\.0\.\w+ is compressed, but vLLM .* passes experts no tensors"):
        ranks.load(directory)


def test_dense_experts_are_left_to_vllm():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from semisparse.integrations.vllm import SemisparseVllmConfig

    config = SemisparseVllmConfig({"model.layers.1.mlp.experts.0.down": None})
    with set_current_vllm_config(VllmConfig()):
        assert config.get_quant_method(object.__new__(RoutedExperts), "model.layers.0.mlp.experts") is None

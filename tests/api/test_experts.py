"""Models with experts: compressed, written, checked, loaded, unpacked."""

import copy
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import semisparse
from semisparse.api import inspect_directory
from semisparse.errors import InputError
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import SparseExperts
from semisparse.patterns import parse_pattern
from tests.architectures import tiny_model
from tests.models import byte_tokenizer

SETTINGS = ("pattern=2:4", "prune=magnitude", "search=none", "format=bitmask")
IDS = torch.arange(2 * 20).view(2, 20)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixtral") / "out"
    semisparse.compress(tiny_model("Mixtral"), byte_tokenizer(), settings=SETTINGS, out=out)
    return out


def test_every_expert_is_packed_under_a_name_of_its_own(mixtral: Path) -> None:
    dense, model = tiny_model("Mixtral"), semisparse.load(mixtral, "cpu")
    assert isinstance(model.model.layers[0].mlp.experts, SparseExperts)
    layers = sparse_layers(model)
    for layer in range(2):
        fused: Any = dense.model.layers[layer].mlp.experts
        for expert in range(4):
            for name, weight in {"gate_up": fused.gate_up_proj, "down": fused.down_proj}.items():
                packed = layers[f"model.layers.{layer}.mlp.experts.{expert}.{name}"].weight
                parse_pattern("2:4").check(packed)
                assert torch.equal(packed, torch.where(packed != 0, weight[expert], 0))  # kept weights are unchanged
    state = model.state_dict()
    assert not any("gate_up_proj" in name for name in state)
    assert torch.equal(state["model.layers.1.mlp.gate.weight"], dense.model.layers[1].mlp.gate.weight)


def test_inspect_lists_and_verifies_experts(mixtral: Path) -> None:
    report = inspect_directory(mixtral, verify=True)
    rows = {row["name"]: row for row in report["layers"]}
    assert rows["model.layers.1.block_sparse_moe.experts.3.down"]["pattern"] == "2:4"  # as the files name it
    assert sum(".experts." in name for name in rows) == 2 * 4 * 2


def test_a_damaged_expert_is_refused_by_name(mixtral: Path, tmp_path: Path) -> None:
    for file in mixtral.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(mixtral / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.2.down.masks"].zero_()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"layer model\.layers\.0\.\w+\.experts\.2\.down"):
        semisparse.load(tmp_path, "cpu")
    config = json.loads((mixtral / "config.json").read_text())
    layers = config["quantization_config"]["layers"]
    layers["model.layers.0.block_sparse_moe.experts.9.down"] = layers["model.layers.0.block_sparse_moe.experts.2.down"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"experts\.9\.down"):
        semisparse.load(tmp_path, "cpu")


@pytest.mark.parametrize(
    "architecture",
    ["GPT-OSS", pytest.param("Mixtral", marks=pytest.mark.slow), pytest.param("Llama-4 text", marks=pytest.mark.slow)],
)
def test_unpacked_it_is_the_original_module_again(architecture: str, tmp_path: Path) -> None:
    semisparse.compress(tiny_model(architecture), byte_tokenizer(), settings=SETTINGS, out=tmp_path / "out")
    model, dense = semisparse.load(tmp_path / "out", "cpu"), tiny_model(architecture)
    expected = model(IDS).logits
    model.dequantize()
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in dense.state_dict().items()
    }
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    semisparse.export(tmp_path / "out", "dense", tmp_path / "dense")
    torch.testing.assert_close(semisparse.load(tmp_path / "dense", "cpu")(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_are_ignored_stay_dense(tmp_path: Path) -> None:
    settings = (*SETTINGS, 'ignore=["*.layers.0.mlp.experts", "*.layers.1.mlp.experts.1.down"]')
    model = tiny_model("GPT-OSS")
    dense: Any = copy.deepcopy(model)
    report = semisparse.compress(model, byte_tokenizer(), settings=settings, out=tmp_path / "out")
    stays = {layer["name"]: layer["bytes"] for layer in report.dense if layer["reason"] == "ignored by the recipe"}
    assert stays == {
        "model.layers.0.mlp.experts": sum(p.nbytes for p in dense.model.layers[0].mlp.experts.parameters()),
        "model.layers.1.mlp.experts.1.down": 32 * 48 * 4,
    }
    loaded: Any = semisparse.load(tmp_path / "out", "cpu")
    left = loaded.model.layers[1].mlp.experts.expert(1).down
    assert type(left) is nn.Linear
    assert torch.equal(left.weight, dense.model.layers[1].mlp.experts.down_proj[1].T)
    assert torch.equal(left.bias, dense.model.layers[1].mlp.experts.down_proj_bias[1])
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("glob", ["*.experts", "*.experts.*"])
def test_all_experts_ignored_stay_fused(glob: str, tmp_path: Path) -> None:
    model: Any = tiny_model("Mixtral")
    report = semisparse.compress(model, byte_tokenizer(), settings=(*SETTINGS, f"ignore={glob}"), out=tmp_path / "out")
    assert len(report.layers) == 8
    ignored = {layer["name"] for layer in report.dense if layer["reason"] == "ignored by the recipe"}
    assert ignored == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    loaded: Any = semisparse.load(tmp_path / "out", "cpu")
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj)


def test_experts_outside_the_decoder_are_left() -> None:
    model: Any = tiny_model("Mixtral")
    model.model.tower = copy.deepcopy(model.model.layers[0].mlp)
    semisparse.compress(model, byte_tokenizer(), settings=SETTINGS)
    assert type(model.model.tower.experts).__name__ == "MixtralExperts"
    assert isinstance(model.model.layers[0].mlp.experts, SparseExperts)


def test_an_unknown_structure_is_refused_in_a_sentence() -> None:
    model = tiny_model("Mixtral")
    experts: Any = model.model.layers[1].mlp.experts
    experts.extra = nn.Parameter(torch.zeros(4, 3, 3))
    with pytest.raises(
        InputError, match=r"1\.mlp\.experts\.gate_up_proj is a fused weight of 3 dim.*'ignore'"
    ) as refusal:
        semisparse.compress(model, byte_tokenizer(), settings=SETTINGS)
    assert len(str(refusal.value)) < 220


DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(20)]


def test_starved_experts_are_named_in_the_report(tmp_path: Path) -> None:
    model: Any = tiny_model("Qwen3-MoE", num_experts=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:3] = -layer.mlp.gate.weight[3:6]  # three logits are above 0 for every token
            layer.mlp.gate.weight[6:] = 0  # so that these are never among the two largest logits
    settings = ("pattern=2:4", "prune=sparsegpt", "search=none", "format=bitmask")
    report = semisparse.compress(
        model, byte_tokenizer(), "rheosparse", DOCUMENTS, tmp_path / "out", settings=settings, samples=8, seqlen=32
    )
    starved = {layer["name"] for layer in report.layers if "on all tokens, 0 were routed to it" in layer["outcome"]}
    assert starved >= {f"model.layers.{n}.mlp.experts.{i}.{p}" for n in "01" for i in "67" for p in ("gate_up", "down")}
    assert len(starved) < 2 * 8  # half of the experts' layers
    assert all(layer["error"] > 0 for layer in report.layers if layer["name"] in starved)


@pytest.mark.slow
def test_a_target_is_reached(tmp_path: Path) -> None:
    """Search and tuning see an expert's layers as any others; all experts of a layer get the same choice."""
    model = tiny_model("Qwen3-MoE", torch.bfloat16)
    report = semisparse.compress(
        model, byte_tokenizer(), "auto", DOCUMENTS, tmp_path / "out", target={"bits": 5.0}, samples=3, seqlen=32
    )
    assert report.reached["bits"] <= 5.0 * 1.02
    for part in ("0.mlp.experts.*.gate_up", "1.mlp.experts.*.down"):
        chosen = {
            (layer["format"], layer["pattern"]) for layer in report.layers if fnmatchcase(layer["name"], f"*.{part}")
        }
        assert len(chosen) == 1
    loaded = semisparse.load(tmp_path / "out", "cpu", torch.bfloat16)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_model_with_experts_is_not_compiled_in_one_graph(mixtral: Path) -> None:
    assert not semisparse.load(mixtral, "cpu").hf_quantizer.is_compileable

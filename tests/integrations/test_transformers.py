"""A compressed directory in plain transformers: load, compute, generate, save again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import semisparse
from semisparse.api import inspect_directory
from semisparse.checkpoint import atomic_directory
from semisparse.errors import CheckpointError, InputError
from semisparse.formats import get_format
from semisparse.integrations.on_import import register_with_transformers
from semisparse.integrations.transformers import mark_compressed, sparse_layers
from semisparse.nn import is_linear, replace_linear, weight_of
from semisparse.patterns import parse_pattern
from tests.models import CONFIGS, random_model
from tests.serving import Served, every_format, write


def compressed(model: PreTrainedModel, pattern: str = "32:64") -> PreTrainedModel:
    entries = {}
    for name, module in list(model.base_model.named_modules(prefix=model.base_model_prefix)):
        if is_linear(module):
            weight = weight_of(module)
            weight.mul_(parse_pattern(pattern).mask(weight.abs().float()))
            packed = get_format("bitmask").pack(weight, pattern)
            replace_linear(model, name, packed)
            entries[name] = packed.spec.to_dict()
    mark_compressed(model, {"quant_method": "semisparse", "version": 1, "layers": entries})
    return model


def save(model: PreTrainedModel, out: Path) -> Path:
    with atomic_directory(out) as scratch:
        model.save_pretrained(scratch)
    return out


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(compressed(random_model("llama")), tmp_path / "model")


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("pattern", ["32:64", "60%"])
def test_load_computes_the_same_and_saves_the_same_bytes(architecture: str, pattern: str, tmp_path: Path):
    dense = random_model(architecture)
    ids = torch.arange(2 * 9).view(2, 9)
    model = compressed(dense, pattern)
    assert sparse_layers(model)
    expected = model(ids).logits
    first = save(model, tmp_path / "first")

    loaded = AutoModelForCausalLM.from_pretrained(first)
    assert sparse_layers(loaded).keys() == sparse_layers(model).keys()
    assert torch.equal(loaded(ids).logits, expected)
    assert loaded.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 13)

    second = save(loaded, tmp_path / "second")
    files = sorted(p.name for p in first.iterdir())
    assert files == sorted(p.name for p in second.iterdir())
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2"])
@torch.no_grad()
def test_without_the_head_saved_and_loaded_with_it(architecture: str, tmp_path: Path):
    """As what computes embeddings loads a causal model."""
    out = save(compressed(random_model(architecture)), tmp_path / "out")
    causal, base = AutoModelForCausalLM.from_pretrained(out), AutoModel.from_pretrained(out)
    ids = torch.arange(3, 13)[None]
    hidden = base(ids).last_hidden_state
    assert torch.equal(hidden, causal.base_model(ids).last_hidden_state)
    assert len(sparse_layers(base)) == len(sparse_layers(causal)) > 0
    base.save_pretrained(tmp_path / "base")
    assert inspect_directory(tmp_path / "base", verify=True)["verified"]
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "base")(ids).last_hidden_state, hidden)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(again(ids).logits, causal(ids).logits)
    again.save_pretrained(tmp_path / "causal")
    assert inspect_directory(tmp_path / "causal", verify=True)["verified"]


def test_another_dtype_casts_what_is_not_packed(directory: Path):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert {layer.packed.dtype for layer in sparse_layers(model).values()} == {torch.bfloat16}
    assert model(torch.arange(5)[None]).logits.dtype == torch.float32


def test_registering_twice_changes_nothing():
    before = AUTO_QUANTIZATION_CONFIG_MAPPING["semisparse"]
    register_with_transformers()
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["semisparse"] is before


def edit_config(directory: Path, change) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: b.update(version=2), "checkpoint version 2 is unknown"),
        (lambda b: b["layers"][LAYER].update(version=99), "format bitmask version 99 is unknown"),
        (lambda b: b["layers"][LAYER].update(format="nonsense"), "unknown format 'nonsense'; known:"),
        (lambda b: b["layers"][LAYER].update(pattern="9:8"), "pattern 9:8"),
        (lambda b: b["layers"][LAYER].update(shape=[44, 88]), "config.json declares"),
        (lambda b: b["layers"][LAYER].update(shape=[-44, 24]), r"N, K of at least 1, got \(-44, 24\)"),
        (lambda b: b["layers"][LAYER].update(dtype="float64"), "unreadable"),
        (lambda b: b["layers"][LAYER].pop("shape"), "unreadable: KeyError"),
        (lambda b: b["layers"][LAYER].update(params={"kept": 10**400}), "is not a finite number below 2"),
        (lambda b: b.update(layers=[]), "no table of layers"),
        (lambda b: b["layers"].update({"model.nothing": b["layers"][LAYER]}), "model.nothing.masks is missing"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(directory: Path, change, sentence: str):
    edit_config(directory, change)
    with pytest.raises(CheckpointError, match=sentence):
        AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(f"{LAYER}.masks"), "masks is missing"),
        (lambda t: t.update({f"{LAYER}.masks": t[f"{LAYER}.masks"][:-1].clone()}), r"\[43, 1\], config.json declares"),
        (lambda t: t.update({f"{LAYER}.values": t[f"{LAYER}.values"].float()}), "float32"),
        (lambda t: t[f"{LAYER}.masks"][5].bitwise_xor_(1), f"layer {LAYER}: tensor masks"),
    ],
)
def test_a_corrupted_tensor_is_refused(directory: Path, change, sentence: str):
    edit_tensors(directory, change)
    with pytest.raises(CheckpointError, match=sentence):
        AutoModelForCausalLM.from_pretrained(directory)


def test_compressing_while_loading_is_refused(tmp_path: Path):
    random_model("llama").save_pretrained(tmp_path)
    from semisparse.integrations.transformers import SemisparseConfig

    with pytest.raises(semisparse.SemisparseError, match="run `semisparse compress"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=SemisparseConfig({"layers": {}}))


def test_a_layer_on_disk_is_refused_and_no_packed_tensor_wants_gradients(directory: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert not any(p.requires_grad for layer in sparse_layers(model).values() for p in layer.parameters())
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    placed = dict.fromkeys(parts, "cpu") | {"model.layers": "disk"}
    with pytest.raises(InputError, match="cannot be: give a device_map without disk"):
        AutoModelForCausalLM.from_pretrained(directory, device_map=placed, offload_folder=str(tmp_path / "off"))


@pytest.mark.parametrize("served", every_format(), ids=lambda served: served.folder)
def test_dequantize_returns_dense_layers_in_the_model_s_dtype(tmp_path: Path, served: Served):
    """Every format with every option: the weights are those that the packed layers unpack to, and no other changes."""
    write(served, tmp_path / "model")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    weights = {name: layer.weight for name, layer in sparse_layers(packed).items()}
    others = {name: tensor.clone() for name, tensor in (*packed.named_parameters(), *packed.named_buffers())}
    assert weights
    plain = packed.dequantize()
    assert plain is packed
    assert not sparse_layers(plain)
    for name, weight in weights.items():
        layer = plain.get_submodule(name)
        assert type(layer) is torch.nn.Linear
        assert layer.weight.dtype == torch.bfloat16
        assert torch.equal(layer.weight, weight.to(torch.bfloat16))
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if name.removesuffix(".weight") not in weights:
            assert tensor.dtype == others[name].dtype, name
            assert torch.equal(tensor, others[name]), name

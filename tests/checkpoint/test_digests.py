"""Digests of packed tensors: written when a model is saved, compared by ``inspect --verify``, optional when loading."""

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.api import inspect_directory, load
from semisparse.errors import CheckpointError
from tests.models import byte_tokenizer, random_model

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    settings = ("search=none", "prune=magnitude")
    semisparse.compress(random_model("llama"), byte_tokenizer(), "rheosparse", None, tmp_path / "a", settings=settings)
    return tmp_path / "a"


def layers_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]["layers"]


def change_config(directory: Path, change) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config["quantization_config"]["layers"])
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def flip(directory: Path, name: str) -> None:
    """Flip the lowest bit of a tensor's first value, which every format accepts."""
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_every_packed_tensor_has_the_digest_of_its_bytes(directory: Path):
    tensors, layers = load_file(directory / "model.safetensors"), layers_of(directory)
    assert layers
    for name, entry in layers.items():
        assert set(entry["digests"]) == {"masks", "values"}
        for tensor, digest in entry["digests"].items():
            octets = tensors[f"{name}.{tensor}"].view(torch.uint8).numpy().tobytes()
            assert digest == hashlib.sha256(octets).hexdigest()


def test_every_other_tensor_has_one_too(directory: Path, tmp_path: Path):
    """A changed bit of any stored tensor is found; a model that is cast has the digests of what is written then."""
    packed = {f"{name}.{tensor}" for name, entry in layers_of(directory).items() for tensor in entry["digests"]}
    others = sorted(set(load_file(directory / "model.safetensors")) - packed)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(others)
    assert sorted(json.loads((directory / "config.json").read_text())["quantization_config"]["digests"]) == others
    assert inspect_directory(directory, verify=True)["verified"]
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(tmp_path / "cast")
    inspect_directory(tmp_path / "cast", verify=True)
    for name in others:
        flip(directory, name)
        with pytest.raises(CheckpointError, match=rf"tensor {name} has the digest .* the file is damaged"):
            inspect_directory(directory, verify=True)
        flip(directory, name)
    config = json.loads((directory / "config.json").read_text())
    for digests in (5, ["lost"], {"lost": 0}):
        config["quantization_config"]["digests"] = digests
        (directory / "config.json").write_text(json.dumps(config))
        for use in (load, inspect_directory, partial(inspect_directory, verify=True)):
            with pytest.raises(CheckpointError, match=r"the digests .* are no object of texts"):
                use(directory)
    config["quantization_config"]["digests"] = {"lost": "0"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tensor lost is missing from the safetensors files"):
        inspect_directory(directory, verify=True)


def as_earlier_builds_wrote_them(directory: Path) -> None:
    """Replace the digests by 16-byte BLAKE2b digests."""
    tensors = load_file(directory / "model.safetensors")

    def change(layers: dict) -> None:
        for name, entry in layers.items():
            for tensor in entry["digests"]:
                octets = tensors[f"{name}.{tensor}"].view(torch.uint8).numpy().tobytes()
                entry["digests"][tensor] = hashlib.blake2b(octets, digest_size=16).hexdigest()

    change_config(directory, change)


def test_digests_of_earlier_builds_are_compared_and_kept(directory: Path, tmp_path: Path):
    as_earlier_builds_wrote_them(directory)
    inspect_directory(directory, verify=True)
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "b")
    assert layers_of(tmp_path / "b") == layers_of(directory)
    flip(directory, f"{LAYER}.values")
    with pytest.raises(CheckpointError, match=rf"tensor {LAYER}.values has the digest"):
        inspect_directory(directory, verify=True)


def test_verify_names_the_first_tensor_that_differs(directory: Path):
    load(directory, verify=True)
    flip(directory, f"{LAYER}.values")
    with pytest.raises(CheckpointError, match=rf"tensor {LAYER}.values has the digest"):
        inspect_directory(directory, verify=True)
    with pytest.raises(CheckpointError, match=rf"tensor {LAYER}.values has the digest"):
        load(directory, verify=True)
    inspect_directory(directory)
    load(directory)


@pytest.mark.parametrize("digests", [{}, {"masks": "00"}, {"masks": "00", "values": "00", "x": "00"}, 7, ["masks"]])
def test_digests_of_other_tensors_are_refused(directory: Path, digests: object):
    change_config(directory, lambda layers: layers[LAYER].update(digests=digests))
    with pytest.raises(CheckpointError, match=rf"layer {LAYER}: its digests in config.json are not those of"):
        inspect_directory(directory, verify=True)
    load(directory)


def test_saving_again_gives_the_same_bytes_with_digests_and_without(directory: Path, tmp_path: Path):
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "b")
    change_config(directory, lambda layers: [entry.pop("digests") for entry in layers.values()])
    inspect_directory(directory, verify=True)
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "c")
    for copy in ("b", "c"):
        assert (tmp_path / copy / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert layers_of(tmp_path / "c") == layers_of(directory)
    renewed = layers_of(tmp_path / "b")
    assert all(entry.pop("digests") for entry in renewed.values())
    assert renewed == layers_of(directory)


def test_a_changed_model_is_saved_with_new_digests(directory: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.get_submodule(LAYER).values.view(torch.int16)[0, 0] ^= 1
    model.save_pretrained(tmp_path / "b")
    assert layers_of(tmp_path / "b")[LAYER]["digests"] != layers_of(directory)[LAYER]["digests"]
    inspect_directory(tmp_path / "b", verify=True)

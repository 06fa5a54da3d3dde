"""Multimodal models: the text decoder is compressed, the rest is left as it is, and the directory loads again."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import semisparse
from semisparse.api import inspect_directory
from semisparse.checkpoint import open_directory
from semisparse.compress.decoder import decoder_layers
from semisparse.errors import InputError
from semisparse.integrations.names import model_layers, stored_keys
from semisparse.integrations.transformers import sparse_layers
from tests.architectures import CONFIGS, MULTIMODAL, tiny_model
from tests.models import byte_tokenizer

SETTINGS = ("pattern=2:4", "prune=magnitude", "search=none", "format=bitmask")


def written(architecture: str, directory: Path) -> Path:
    tiny_model(architecture).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory of Gemma-3, whose vision tower is the larger part, and what `compress` makes of it."""
    folder = tmp_path_factory.mktemp("gemma")
    source = written("Gemma-3", folder / "in")
    for name, content in {"preprocessor_config.json": "{}", "vocab.tiktoken": "x", "LICENSE": "free"}.items():
        (source / name).write_text(content)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{}")
    for unwanted in ("pytorch_model.bin", "modeling.py", ".hidden", "pytorch_model.bin.index.json"):
        (source / unwanted).write_text("")
    semisparse.compress(source, settings=SETTINGS, out=folder / "out")
    return source, folder / "out"


def test_the_text_decoder_is_compressed_and_nothing_else(gemma: tuple[Path, Path]) -> None:
    source, out = gemma
    model, dense = semisparse.load(out, "cpu"), semisparse.load(source, "cpu")
    layers = sparse_layers(model)
    assert len(layers) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in layers)
    state = model.state_dict()
    for name, tensor in dense.state_dict().items():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(state[name], tensor), name


def test_names_in_config_json_are_those_in_the_files(gemma: tuple[Path, Path]) -> None:
    """config.json names layers as the published checkpoints do, so that other software finds them."""
    source, out = gemma
    directory = open_directory(out)
    assert {name.rpartition(".layers.")[0] for name in directory.layers} == {"language_model.model"}
    assert {f"{name}.weight" for name in directory.layers} <= set(open_directory(source).headers)
    model = semisparse.load(out, "cpu")
    names = model_layers(model, directory.layers)
    assert set(names.values()) == set(sparse_layers(model))
    stored = stored_keys(model, [f"{name}.masks" for name in names.values()])
    assert {stored[f"{names[name]}.masks"]: name for name in names} == {f"{name}.masks": name for name in names}


def test_saved_again_it_is_the_same(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = gemma
    semisparse.load(out, "cpu").save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    blocks = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (out, tmp_path)]
    assert blocks[0]["layers"] == blocks[1]["layers"]
    assert inspect_directory(tmp_path, verify=True)["verified"]


def test_shapes_are_checked_under_their_names_on_disk(gemma: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = gemma
    shutil.copytree(out, tmp_path / "wrong")
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 40
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"language_model\.model\.layers\.0\.mlp\.\w+_proj is stored as N, K"):
        inspect_directory(tmp_path / "wrong", verify=True)


def test_files_of_any_name_are_copied_but_no_weights_and_no_code(gemma: tuple[Path, Path]) -> None:
    source, out = gemma
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    here = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert here - copied == {"pytorch_model.bin", "modeling.py", ".hidden", "pytorch_model.bin.index.json"}
    assert copied <= here


def test_an_encoder_decoder_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="T5ForConditionalGeneration is an encoder-decoder"):
        semisparse.compress(tiny_model("T5"), settings=SETTINGS, out=tmp_path / "out")


@torch.no_grad()
def test_it_reads_images(gemma: tuple[Path, Path]) -> None:
    """The logits of a prompt with an image are those of the unpacked weights, and depend on the image."""
    model = semisparse.load(gemma[1], "cpu")
    ids = torch.tensor([[5, 256, 258, 258, 258, 258, 257, 6, 7]])
    images = torch.randn(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = [model(ids, pixel_values=image, token_type_ids=(ids == 258).long()).logits for image in images]
    assert not torch.allclose(*found, rtol=1e-2)
    model.dequantize()
    expected = model(ids, pixel_values=images[0], token_type_ids=(ids == 258).long()).logits
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("architecture", MULTIMODAL)
def test_the_text_decoder_is_found_beside_any_tower(architecture: str, towers: int) -> None:
    """The vision tower holds more weights, in as many layers as the text decoder or in more."""
    vision = CONFIGS[architecture][1]["vision_config"]
    depth = "depth" if "depth" in vision else "num_hidden_layers"
    name, layers = decoder_layers(tiny_model(architecture, vision_config={**vision, depth: towers}))
    assert "language_model" in name
    assert len(layers) == 2

"""Compressing, saving and loading models of every architecture, and real ones."""

import copy
import json
from pathlib import Path

import pytest
import torch

import semisparse
from semisparse.api import load_tokenizer
from semisparse.errors import InputError
from semisparse.integrations.transformers import sparse_layers
from semisparse.patterns import parse_pattern
from tests.compress.search.small import sharp
from tests.models import CONFIGS, SHARED, byte_tokenizer, random_model

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]
SMALL = {"samples": 8, "seqlen": 32}
LINEARS = {"opt": 12, "gpt2": 8}
"""Compressed layers in two decoder layers, for architectures that do not have 7 in each."""


PATTERNS = ("6:8", "8:32v4", "g4@50%", "70%")


@pytest.mark.parametrize(("architecture", "pattern"), zip(CONFIGS, (*PATTERNS, *PATTERNS), strict=True))
def test_compress_save_load_for_every_architecture_and_pattern(architecture: str, pattern: str, tmp_path: Path):
    model = random_model(architecture)
    dense = copy.deepcopy(model)
    settings = (f"pattern={pattern}", "search=none")
    report = semisparse.compress(
        model, byte_tokenizer(), calibration=DOCUMENTS, out=tmp_path / "out", settings=settings, **SMALL
    )
    assert len(report.layers) == len(sparse_layers(model)) == LINEARS.get(architecture, 14)
    for name, layer in sparse_layers(model).items():
        parse_pattern(pattern).check(layer.weight)
        bias = getattr(dense.get_submodule(name), "bias", None)
        assert (layer.bias is None) == (bias is None)
        assert bias is None or torch.equal(layer.bias, bias)
    ids = torch.arange(2 * 20).view(2, 20)
    loaded = semisparse.load(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not torch.equal(model(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_gqsa_tunes_packs_and_loads(architecture: str, tmp_path: Path):
    """The stored weights are the tuned ones: the loaded model computes the same bits as the one in memory."""
    model = random_model(architecture)
    settings = ("pattern=g4@50%", "tune_epochs=1")
    report = semisparse.compress(
        model, byte_tokenizer(), "gqsa", DOCUMENTS, tmp_path / "out", settings=settings, **SMALL
    )
    assert {layer["format"] for layer in report.layers} == {"gqs"}
    assert all("bqpo" in layer["outcome"] and "e2e" in layer["outcome"] for layer in report.layers)
    assert [found["stage"] for found in report.tuning] == ["decoder layer 1 of 2", "decoder layer 2 of 2", "end to end"]
    assert all(found["after"] <= found["before"] and found["seconds"] > 0 for found in report.tuning)
    assert json.loads(json.dumps(report.to_dict()))["tuning"] == report.tuning
    ids = torch.arange(2 * 20).view(2, 20)
    loaded = semisparse.load(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("pattern", ["32:64", pytest.param("g4@50%", marks=pytest.mark.slow)])
def test_what_a_search_found_reaches_the_checkpoint(pattern: str, tmp_path: Path):
    settings = (f"pattern={pattern}", "search=evolution", "search_effort=24", "format=bitmask")
    model = sharp(random_model("llama"))
    report = semisparse.compress(
        model, byte_tokenizer(), calibration=DOCUMENTS, out=tmp_path / "out", settings=settings, **SMALL
    )
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["search"] == report.search
    assert report.search["evaluations"] > 0
    patterns = {layer["name"]: parse_pattern(layer["pattern"]) for layer in report.layers}
    assert (len(set(patterns.values())) > 1) == (report.search["kl"] < report.search["uniform_kl"])
    loaded = semisparse.load(tmp_path / "out", dtype=torch.bfloat16)
    shapes = {name: tuple(layer.weight.shape) for name, layer in sparse_layers(loaded).items()}
    assert sum(patterns[name].kept(shape) for name, shape in shapes.items()) == sum(
        parse_pattern(pattern).kept(shape) for shape in shapes.values()
    )
    for name, layer in sparse_layers(loaded).items():
        patterns[name].check(layer.weight)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_nothing_pruned_is_nothing_lost(tmp_path: Path):
    model = random_model("llama")
    dense = copy.deepcopy(model)
    semisparse.compress(model, recipe="rheosparse", settings=("pattern=0%", "prune=none"))
    for name, layer in sparse_layers(model).items():
        assert torch.equal(layer.weight, dense.get_submodule(name).weight)


def test_calibration_text_needs_a_tokenizer():
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        semisparse.compress(random_model("llama"), calibration=DOCUMENTS)


@pytest.fixture
def pycode() -> Path:
    path = SHARED / "models" / "pycode-11m"
    if not path.is_dir():
        pytest.skip("the real models in ../shared are not here")
    return path


def test_a_real_model_shrinks_and_keeps_its_logits(pycode: Path, tmp_path: Path):
    model, tokenizer = semisparse.load(pycode, device="cpu", dtype=torch.bfloat16), load_tokenizer(pycode)
    (tmp_path / "text.txt").write_text((SHARED / "text" / "pycode-calib.txt").read_text()[:20_000])
    report = semisparse.compress(
        model,
        tokenizer,
        calibration=tmp_path / "text.txt",
        out=tmp_path / "out",
        settings=("search=none", "prune=wanda"),  # in a third of the time
        samples=8,
        seqlen=128,
        device="cpu",
    )
    assert report.bytes_after <= 0.58 * report.bytes_before
    ids = torch.tensor([tokenizer("def main():\n    return")["input_ids"]])
    loaded = semisparse.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    weights = "model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (tmp_path / "out" / weights).read_bytes()

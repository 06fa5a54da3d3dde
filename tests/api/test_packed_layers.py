"""Decoder layers are packed when finished: dense weights are not written to, and resumed runs give the same bytes."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import semisparse
from semisparse.api import inspect_directory
from semisparse.nn import is_linear
from tests.compress.checking import Interrupted
from tests.models import byte_tokenizer, random_model

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]
RECIPES = {
    "kept": ("rheosparse", ("prune=none", "pattern=0%", "format=bitmask")),
    "magnitude": ("rheosparse", ("prune=magnitude", "search=none", "pattern=2:4")),
    "sparsegpt": ("rheosparse", ("search=none", "pattern=2:4")),
    "groups, tuned": ("gqsa", ("pattern=g4@50%", "tune=bqpo", "tune_epochs=1")),
    "rounded when packed": ("slidesparse", ("quant=int8",)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "dense"
    random_model("llama", num_hidden_layers=3).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def compress(source: Path, way: str, out: Path, stop_at: int = 0) -> None:
    """Compress a directory; interrupt the run before its decoder layer of this number."""

    def progress(stage: str, done: int, total: int) -> None:
        if stage == f"decoder layer {stop_at} of 3":
            raise Interrupted

    recipe, settings = RECIPES[way]
    text = None if way in ("kept", "magnitude") else DOCUMENTS
    kwargs = {"settings": settings, "calibration": text, "samples": 8, "seqlen": 32, "device": "cpu"}
    semisparse.compress(source, recipe=recipe, out=out, resume=True, progress=progress, **kwargs)


@pytest.mark.parametrize(
    "way",
    ["sparsegpt", *(pytest.param(way, marks=pytest.mark.slow) for way in RECIPES if way != "sparsegpt")],
)
def test_a_resumed_run_writes_the_same_files(way: str, source: Path, tmp_path: Path):
    compress(source, way, tmp_path / "whole")
    for stop_at in (2, 3):
        with pytest.raises(Interrupted):
            compress(source, way, tmp_path / "out", stop_at)
    work = [path.name for path in (tmp_path / "out.partial").glob("block-*.json")]
    assert sorted(work) == ["block-0000.json", "block-0001.json"]
    compress(source, way, tmp_path / "out")
    for name in ("model.safetensors", "config.json"):
        whole, resumed = ((tmp_path / run / name).read_bytes() for run in ("whole", "out"))
        assert whole == resumed, name
    inspect_directory(tmp_path / "out", verify=True)


def test_a_damaged_piece_is_compressed_again(source: Path, tmp_path: Path):
    compress(source, "sparsegpt", tmp_path / "whole")
    with pytest.raises(Interrupted):
        compress(source, "sparsegpt", tmp_path / "out", 3)
    piece = tmp_path / "out.partial" / "block-0000.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="block-0000 of the interrupted run .* is damaged"):
        compress(source, "sparsegpt", tmp_path / "out")
    whole, resumed = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "out"))
    assert whole == resumed


def test_dense_weights_are_not_written_to(tmp_path: Path):
    """They may be mapped from a file: a page that is written to becomes memory of the process."""
    model: PreTrainedModel = random_model("llama")
    weights = {name: module.weight for name, module in model.named_modules() if is_linear(module)}
    before = {name: weight.clone() for name, weight in weights.items()}
    semisparse.compress(
        model,
        byte_tokenizer(),
        calibration=DOCUMENTS,
        settings=("pattern=2:4", "search=none", "tune=bqpo", "tune_epochs=1"),
        samples=8,
        seqlen=32,
        device="cpu",
    )
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert not any(is_linear(module) for name, module in model.named_modules() if name.startswith("model.layers"))

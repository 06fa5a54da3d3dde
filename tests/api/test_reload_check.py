"""Every written model is loaded again before its directory gets its final name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import semisparse
from semisparse.errors import SemisparseError
from tests.models import byte_tokenizer, random_model

SETTINGS = ("pattern=2:4", "prune=magnitude", "search=none", "format=bitmask")
Change = Callable[[dict[str, Tensor]], object]


def compress(out: Path, architecture: str = "llama") -> semisparse.CompressionReport:
    return semisparse.compress(random_model(architecture), byte_tokenizer(), settings=SETTINGS, out=out)


def write_as(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Make ``save_pretrained`` change the tensors that it has written."""
    save = PreTrainedModel.save_pretrained

    def save_changed(self: PreTrainedModel, directory: Path, **kwargs: object) -> None:
        save(self, directory, **kwargs)
        file = Path(directory) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["model.norm.weight"].mul_(1.5), "computes logits that differ by"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.masks"), "does not load again: tensor model.layers.0"),
        (
            lambda tensors: tensors["model.layers.1.mlp.up_proj.masks"].zero_(),
            "does not load again: layer model.layers",
        ),
    ],
)
def test_a_model_that_loads_as_another_is_refused_and_left(
    change: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_as(monkeypatch, change)
    out, refused = tmp_path / "out", tmp_path / "out.partial" / "refused"
    with pytest.raises(SemisparseError, match=message) as failure:
        compress(out)
    assert str(failure.value).endswith(f"it is left in {refused}")
    assert not out.exists()
    assert json.loads((refused / "config.json").read_text())["quantization_config"]["quant_method"] == "semisparse"


def test_a_model_that_does_not_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")

    def fail(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model.model.norm, "forward", fail)
    with pytest.raises(SemisparseError, match="does not run: RuntimeError: no such kernel"):
        semisparse.compress(model, byte_tokenizer(), settings=SETTINGS, out=tmp_path / "out")


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_sound_model_leaves_nothing_else(architecture: str, tmp_path: Path) -> None:
    compress(tmp_path / "out", architecture)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_keeps_its_mode(tmp_path: Path) -> None:
    model = random_model("gpt2").train()  # with dropout, no two forwards would be equal
    semisparse.compress(model, byte_tokenizer(), settings=SETTINGS, out=tmp_path / "out")
    assert model.training
    assert torch.isfinite(semisparse.load(tmp_path / "out", "cpu")(torch.arange(4)[None]).logits).all()


@pytest.mark.parametrize("setting", [{"vocab_size": 5}, {"n_positions": 3}])
def test_the_check_fits_a_small_vocabulary_and_a_short_context(setting: dict[str, int], tmp_path: Path) -> None:
    model = random_model("gpt2", bos_token_id=0, eos_token_id=1, **setting)
    semisparse.compress(model, byte_tokenizer(), settings=SETTINGS, out=tmp_path / "out")
    assert torch.isfinite(semisparse.load(tmp_path / "out", "cpu")(torch.arange(3)[None]).logits).all()

"""Models in memory that cannot be compressed are refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import semisparse
from semisparse.errors import InputError
from tests.models import byte_tokenizer, random_model

SETTINGS = ("pattern=2:4", "prune=magnitude", "search=none")


def repeated() -> nn.Module:
    model = random_model("llama")
    model.model.layers[1] = model.model.layers[0]
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: random_model("llama").double(), r"model.layers.0.\w+.\w+ is torch.float64, and formats store float16"),
        (lambda: random_model("llama").model, "LlamaModel predicts no tokens: load the model with .*ForCausalLM"),
        (lambda: random_model("llama").to("meta"), r"model.embed_tokens.weight of \w+ is not in memory: give the"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), "the model is a Sequential; expected a directory"),
        (repeated, r"model.layers of LlamaForCausalLM holds one module several times"),
    ],
    ids=["float64", "no head", "offloaded", "not transformers'", "a layer twice"],
)
def test_an_unsuitable_model_is_refused(model: Any, sentence: str, tmp_path: Path):
    with pytest.raises(InputError, match=sentence):
        semisparse.compress(model(), settings=SETTINGS, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_directory_in_float64_is_refused(tmp_path: Path):
    random_model("llama", torch.float64).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=r"is torch.float64, and formats store"):
        semisparse.compress(tmp_path / "model", settings=SETTINGS, out=tmp_path / "out")


@pytest.mark.parametrize("document", [5, {"text": "abc"}, torch.arange(8)])
def test_documents_are_strings(document: object):
    with pytest.raises(InputError, match=r"a document of the given text is \w+, expected strings"):
        semisparse.compress(
            random_model("llama"), byte_tokenizer(), recipe="gqsa", calibration=["abc" * 99, document], seqlen=8
        )

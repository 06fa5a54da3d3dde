"""Dense directories that transformers would load into nonsense are refused, with the tensor and what it should be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from semisparse.checkpoint import load_model, load_tokenizer
from semisparse.errors import CheckpointError
from tests.models import byte_tokenizer, random_model

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weight: weight[:, :-4], r"down_proj.weight is \[24, 40\], the model of config.json has \[24, 44\]"),
        (lambda weight: (weight * 100).int(), "down_proj.weight is stored as torch.int32, expected floating-point"),
    ],
)
def test_a_weight_unlike_the_models_is_refused(change: Callable[[Tensor], Tensor], sentence: str, tmp_path: Path):
    random_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NAME] = change(tensors[NAME]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=sentence):
        load_model(tmp_path)


def test_tensors_that_the_model_has_no_place_for_are_named(tmp_path: Path):
    """As of a classifier whose embeddings are tied: it would become a language model, and its own head be lost."""
    config = LlamaConfig(**random_model("llama").config.to_dict() | {"tie_word_embeddings": True})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has no place for tensor score.weight of .*: left out"):
        load_model(tmp_path, "cpu")


def test_a_device_may_be_torch_s(tmp_path: Path):
    random_model("llama").save_pretrained(tmp_path)
    assert load_model(tmp_path, torch.device("cpu")).device == torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_directory_without_a_tokenizer_is_refused(family: str, tmp_path: Path):
    random_model(family).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) >= len(byte_tokenizer())  # a family may add its own special tokens

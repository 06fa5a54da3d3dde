"""A directory that the version of November 22, 2026 wrote (commit 8a8c3ad) loads, and saves to the same bytes.

older/ is a Llama of three decoder layers with random weights, every format, and most patterns and kinds of each. That
version also wrote expected.json: a digest of each unpacked weight, and the logits of tokens 0 to 11 on a CPU.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import semisparse  # noqa: F401  transformers learns the format
from semisparse.api import inspect_directory
from semisparse.formats import registry
from semisparse.nn import SparseLinear

OLDER = Path(__file__).parent / "older"
EXPECTED = json.loads((OLDER / "expected.json").read_text())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(OLDER)


def block_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def test_it_has_every_format():
    assert {layer["format"] for layer in block_of(OLDER)["layers"].values()} == set(registry())


def test_weights_are_those_that_were_packed(model: PreTrainedModel):
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    weights = {name: layer.weight.contiguous().view(torch.uint8) for name, layer in layers.items()}
    found = {name: hashlib.sha256(weight.numpy().tobytes()).hexdigest() for name, weight in weights.items()}
    assert found == EXPECTED["weights"]


@torch.no_grad()
def test_it_computes_the_same(model: PreTrainedModel):
    logits, expected = model(torch.arange(12)[None]).logits[0].float(), torch.tensor(EXPECTED["logits"])
    assert (logits - expected).norm() / expected.norm() < 0.02  # .011: kernels of then and now round elsewhere


def test_saving_gives_the_same_bytes(model: PreTrainedModel, tmp_path: Path):
    model.save_pretrained(tmp_path / "again")
    again = tmp_path / "again" / "model.safetensors"
    assert again.read_bytes() == (OLDER / "model.safetensors").read_bytes()
    assert block_of(tmp_path / "again")["layers"] == block_of(OLDER)["layers"]


def test_inspect_verifies_it():
    packed = {layer["name"] for layer in inspect_directory(OLDER, verify=True)["layers"]} & set(EXPECTED["weights"])
    assert packed == set(EXPECTED["weights"])

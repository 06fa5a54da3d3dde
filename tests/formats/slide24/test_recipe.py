"""The recipe ``slidesparse``: its weights are quantised, saved and loaded, and what no format stores is refused."""

import pytest
import torch

import semisparse
from semisparse.api import read_recipe
from semisparse.errors import RecipeError
from semisparse.integrations.transformers import sparse_layers
from semisparse.patterns import parse_pattern
from tests.models import byte_tokenizer, random_model


@pytest.mark.parametrize("quant", ["none", pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_the_recipe_quantises_saves_and_loads(quant, tmp_path):
    model = random_model("llama")
    documents = [f"document {i}: some words to read" for i in range(8)]
    report = semisparse.compress(
        model, byte_tokenizer(), "slidesparse", documents, tmp_path / "out",
        settings=(f"quant={quant}",), samples=4, seqlen=16,
    )  # fmt: skip
    assert {layer["format"] for layer in report.layers} == {"slide24"}
    for layer in sparse_layers(model).values():
        assert layer.packed.params == ({} if quant == "none" else {"kind": quant})
        parse_pattern("6:8").check(layer.weight)
    ids = torch.arange(40).view(2, 20)
    loaded = semisparse.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_quantisation_that_no_format_stores_is_refused():
    with pytest.raises(RecipeError, match="format auto does not store quant=fp8"):
        read_recipe("slidesparse", ("quant=fp8", "format=auto"))
    with pytest.raises(RecipeError, match="'quant' is 'fp4'; it is one of: none, int8, fp8"):
        read_recipe("slidesparse", ("quant=fp4",))


def test_another_formats_recipe_names_this_format():
    message = "bitmask does not store quant=int8 of pattern 6:8; set another quant or format=dense or slide24"
    with pytest.raises(RecipeError, match=message):
        read_recipe("rheosparse", ("format=bitmask", "quant=int8", "pattern=6:8"))

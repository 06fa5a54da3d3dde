"""Dense low bits compared with a recipe: their KL and bits are those of the recipe that stores them."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

import semisparse
from semisparse.api import inspect_directory
from semisparse.api.recipe import read_recipe
from semisparse.api.rivals import Rivals
from semisparse.compress import calibration_batches
from tests.models import byte_tokenizer, random_model

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(20)]


def model_of_whole_groups() -> PreTrainedModel:
    """Groups of 128 would pad narrower layers, so that dense low bits would take more than 16 bits per weight."""
    return random_model("llama", torch.float32, hidden_size=256, intermediate_size=384)


def batches() -> list[torch.Tensor]:
    return list(calibration_batches(byte_tokenizer(), DOCUMENTS, samples=8, seqlen=32, seed=0))


def compressed(out: Path, recipe: str, *settings: str) -> semisparse.CompressionReport:
    return semisparse.compress(
        model_of_whole_groups(), byte_tokenizer(), recipe, DOCUMENTS, out, settings=settings, samples=8, seqlen=32
    )


def test_a_recipe_says_that_dense_low_bits_keep_more(tmp_path: Path):
    rival = compressed(tmp_path / "sparse", "rheosparse", "search=none", "pattern=32:64").rival
    assert rival is not None
    assert rival["recipe"] == "dense-w8"
    assert rival["kl"] < rival["own_kl"]
    # What the recipe stores, rounded to nearest too, has the same bits and the same KL.
    compressed(tmp_path / "dense", "dense-w8", "prune=magnitude", "tune=none")
    assert rival["bits"] == pytest.approx(inspect_directory(tmp_path / "dense")["bits_per_weight"], rel=1e-4)
    dense, rounded, sparse = (
        torch.cat([model(ids).logits[:, :-1].float().log_softmax(-1).flatten(0, 1) for ids in batches()])
        for model in (
            model_of_whole_groups(),
            semisparse.load(tmp_path / "dense", "cpu", torch.float32),
            semisparse.load(tmp_path / "sparse", "cpu", torch.float32),
        )
    )
    assert rival["tokens"] == dense[..., 0].numel()
    for found, key in ((rounded, "kl"), (sparse, "own_kl")):
        kl = F.kl_div(found, dense, log_target=True, reduction="none").sum(-1).mean().item()
        assert rival[key] == pytest.approx(kl, rel=1e-2), key  # a KL of 1e-5 from float32 logits


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("dense-w8", ("tune=none",)), ("gqsa", ("tune=none", "quant=w2"))],
    ids=["is one itself", "no rival has so few bits"],
)
def test_nothing_is_said_where_no_rival_keeps_more(tmp_path: Path, recipe: str, settings: tuple[str, ...]):
    assert compressed(tmp_path / "out", recipe, *settings).rival is None


def test_measuring_leaves_the_model_as_it_was():
    model = model_of_whole_groups().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Rivals(model, read_recipe("rheosparse"), batches(), torch.device("cpu"))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

"""The script that trains the mixture of the quality tables: its models, what is kept, and a run of a few steps."""

import json
import sys
from pathlib import Path

import pytest
import torch
import train_mixture
from torch import nn
from train_demo import BestWeights
from train_mixture import CHOSEN, EXPERTS, build
from transformers import AutoModelForCausalLM

from semisparse.nn import is_fused_experts
from tests.models import byte_tokenizer


def test_the_mixture_has_eight_experts_and_at_most_eight_million_parameters():
    model = build(byte_tokenizer(), None)
    experts = [module for module in model.modules() if is_fused_experts(module)]
    assert len(experts) == model.config.num_hidden_layers
    assert {len(module.down_proj) for module in experts} == {EXPERTS} == {8}
    assert model.config.num_experts_per_tok == CHOSEN == 2
    assert model.num_parameters() + (1024 - 260) * model.config.hidden_size <= 8e6


def test_the_weights_of_the_lowest_loss_are_kept_until_it_fails_to_fall():
    model = nn.Linear(1, 1, bias=False)
    best, going_on = BestWeights(model, patience=2), []
    for weight, loss in enumerate([3.0, 2.0, 2.5, 1.0, 1.5, 1.0]):
        model.weight.data.fill_(weight)
        going_on.append(best.keep_if_best(loss))
    assert going_on == [True, True, True, True, True, False]
    best.restore()
    assert model.weight.item() == 3


def test_computing_every_expert_gives_what_transformers_computes():
    torch.manual_seed(0)
    model = build(byte_tokenizer(), None)
    tokens = torch.arange(24).view(2, 12)
    found = model(tokens).logits
    model.config._experts_implementation = "eager"
    torch.testing.assert_close(found, model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_writes_the_mixture_and_the_dense_model_nearest_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text").mkdir()
    source = Path(train_mixture.__file__).read_text()
    (tmp_path / "text" / train_mixture.TEXT).write_text(source * 12)
    monkeypatch.setattr(train_mixture, "DENSE_WIDTHS", (32, 64))
    monkeypatch.setattr(train_mixture, "MIXTURE_STEPS", (1, 2))
    steps = ["--steps", "3", "--batch", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train_mixture", str(tmp_path), *steps])
    train_mixture.main()
    found = json.loads((tmp_path / "models" / "mixture.json").read_text())
    gaps = [(abs(m["held_out"] - d["held_out"]), m, d) for m in found[:2] for d in found[2:]]
    _, mixture, dense = min(gaps, key=lambda gap: gap[0])
    assert [model for model in found if model["written"]] == [mixture, dense]
    for name, expected in (("mixture", mixture), ("mixture-dense", dense)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / name)
        assert model.dtype == torch.bfloat16
        assert model.num_parameters() == expected["parameters"]

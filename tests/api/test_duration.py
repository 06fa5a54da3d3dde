"""The time of a compression, as it is said beforehand, against times that were measured on an H200."""

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.api import compression, read_recipe
from semisparse.api.duration import duration, seconds_on_gpu
from semisparse.bench.machines import Machine, find_machine
from semisparse.bench.shapes import architecture
from semisparse.compress import Ranks, split_decoder_experts
from semisparse.compress.propagate import list_decoder_layers
from tests.architectures import tiny_model
from tests.models import byte_tokenizer, random_model

H200 = find_machine("h200")


def seconds(
    arch: str,
    *settings: str,
    recipe: str = "rheosparse",
    machine: Machine | None = H200,
    layers: int = 2,
    count: int = 1,
) -> float | None:
    """Return what is said of a model on 262,144 tokens."""
    config, ranks = architecture(arch), Ranks()
    config.num_hidden_layers, ranks.count = layers, count
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plan = read_recipe(recipe, settings)
    batches = [torch.zeros(4, 2048, dtype=torch.int64)] * 32
    return seconds_on_gpu(list_decoder_layers(model, plan, {}), plan, batches, machine, ranks)


@pytest.mark.parametrize(
    ("arch", "settings", "measured"),
    [("llama2-7b", ["search=none"], 6.10), ("llama2-70b", ["search=none"], 28.0)],
)
def test_decoder_layers_take_what_was_measured(arch: str, settings: Sequence[str], measured: float):
    """Within a fifth: results/h200/compressing-pair.csv and compressing.csv."""
    two, four = (seconds(arch, *settings, layers=layers) for layers in (2, 4))
    assert (four - two) / 2 == pytest.approx(measured, rel=0.2)


def test_a_search_takes_its_candidates_and_the_compression():
    alone, searched = seconds("llama2-7b", "search=none"), seconds("llama2-7b")
    assert (searched - alone) / 13 / 2 == pytest.approx(2.30, rel=0.1)  # results/h200/compressing-blocks.csv
    assert seconds("llama2-7b", "search=none", count=2) / 2 == pytest.approx(3.35, rel=0.1)  # compressing-pair.csv


@pytest.mark.parametrize(
    ("arch", "settings", "recipe", "machine"),
    [
        ("llama2-7b", ["search=none"], "rheosparse", None),
        ("llama2-7b", ["search=evolution"], "rheosparse", H200),
        ("llama2-7b", ["search=none", "pattern=50%"], "rheosparse", H200),
        ("llama2-7b", ["search=none", "prune=wanda"], "rheosparse", H200),
        ("llama2-7b", [], "dense-w4", H200),
    ],
)
def test_nothing_is_said_of_what_was_not_measured(
    arch: str, settings: Sequence[str], recipe: str, machine: Machine | None
):
    assert seconds(arch, *settings, recipe=recipe, machine=machine, layers=1) is None


def test_nothing_is_said_of_experts():
    model, plan = tiny_model("Mixtral"), read_recipe("rheosparse", ["search=none"])
    split_decoder_experts(model, plan)
    layers = list_decoder_layers(model, plan, {})
    assert seconds_on_gpu(layers, plan, [torch.zeros(4, 64, dtype=torch.int64)], H200, Ranks()) is None


def test_it_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(compression, "machine_here", lambda device: H200)
    model, text = random_model("llama"), ["some words to read " * 9] * 4
    semisparse.compress(
        model, byte_tokenizer(), calibration=text, settings=["search=none"], inform=said.append, device="cpu"
    )
    assert said[0].startswith("compressing takes up to ")
    assert said[0].endswith("; the GPU works for some 0 s")
    assert duration(1200.0) == "; the GPU works for some 20 minutes"
    assert duration(None) == ""

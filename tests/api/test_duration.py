"""The time of a compression, as it is said beforehand, against times that were measured on an H200."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import semisparse
from semisparse.api import compression, read_recipe
from semisparse.api.duration import Span, duration, seconds_on_gpu
from semisparse.bench.machines import Machine, find_machine
from semisparse.bench.shapes import architecture
from semisparse.compress import Ranks, split_decoder_experts
from semisparse.compress.layers import list_decoder_layers
from tests.architectures import tiny_model
from tests.models import byte_tokenizer, random_model

H200 = find_machine("h200")


def span(
    arch: str,
    *settings: str,
    recipe: str = "rheosparse",
    target: Mapping[str, float] | None = None,
    machine: Machine | None = H200,
    layers: int = 2,
    count: int = 1,
    sequences: int = 128,
    streams: bool = False,
) -> Span | None:
    """Return what is said of a model on sequences of 2,048 tokens."""
    config, ranks = architecture(arch), Ranks()
    config.num_hidden_layers, ranks.count = layers, count
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plan = read_recipe(recipe, settings, target)
    batches = [torch.zeros(4, 2048, dtype=torch.int64)] * (sequences // 4)
    return seconds_on_gpu(list_decoder_layers(model, plan, {}), plan, batches, machine, ranks, streams)


def seconds(arch: str, *settings: str, **how: Any) -> float:
    """Return what is said of a compression without anything that may end early."""
    said = span(arch, *settings, **how)
    assert said is not None
    assert said.least == said.most
    return said.least


@pytest.mark.parametrize(
    ("arch", "settings", "measured"),
    [("llama2-7b", ["search=none"], 6.10), ("llama2-70b", ["search=none"], 28.0)],
)
def test_decoder_layers_take_what_was_measured(arch: str, settings: Sequence[str], measured: float):
    """Within a fifth: results/h200/compressing-pair.csv and compressing.csv."""
    two, four = (seconds(arch, *settings, layers=layers) for layers in (2, 4))
    assert (four - two) / 2 == pytest.approx(measured, rel=0.2)


def test_a_rank_has_its_share_of_the_sums_and_the_pruning():
    assert seconds("llama2-7b", "search=none", count=2) / 2 == pytest.approx(3.35, rel=0.1)  # compressing-pair.csv


def test_a_candidate_alone_takes_what_was_measured():
    """results/h200/compressing-blocks.csv; all text is pruned on, so that the best one's weights are kept."""
    said = span("llama2-7b", sequences=32)
    assert said is not None
    assert said.most / 13 / 2 == pytest.approx(2.30, rel=0.1)
    assert said.least / said.most == pytest.approx(11 / 13)


def test_candidates_side_by_side_take_what_was_measured():
    """results/h200/profile-marks.csv: nine candidates of 32 decoder layers, and each of the three after them."""
    said, compressing = span("llama2-7b", layers=32), seconds("llama2-7b", "search=none", layers=32)
    assert said is not None
    each = (said.most - said.least) / 2
    assert each / 32 == pytest.approx(1.49, rel=0.15)
    assert (said.least - compressing - 2 * each) / 9 / 32 == pytest.approx(1.28, rel=0.1)


def test_a_search_over_banks_takes_what_was_measured():
    """results/h200/evolution-marks.csv: two decoder layers, from the first bank to the result."""
    assert seconds("llama2-7b", "search=evolution") == pytest.approx(72.6 + 0.1 - 9.7, rel=0.15)


def test_a_joint_search_and_its_tuning_take_what_was_measured():
    """results/h200/bits3-marks.csv: tuning stopped at half of its steps, and no finalist was tuned."""
    said = span("llama2-7b", recipe="auto", target={"bits": 3}, layers=8)
    assert said is not None
    assert said.least == pytest.approx(384.2 - 12.8, rel=0.1)
    assert said.most > 2 * said.least


def test_training_steps_take_what_was_measured():
    """results/h200/bits3-marks.csv: tuning of a decoder layer of llama2-7b took 17.5 s in half of 1,200 steps."""
    tuned, untuned = span("llama2-7b", "search=none", "tune=bqpo"), seconds("llama2-7b", "search=none")
    assert tuned is not None
    assert (tuned.least - untuned) / 2 == pytest.approx(17.5, rel=0.05)
    assert tuned.most - untuned == pytest.approx(2 * (tuned.least - untuned))


@pytest.mark.parametrize(
    ("arch", "settings", "how"),
    [
        ("llama2-7b", ["search=none"], {"machine": None}),
        ("llama2-7b", ["search=evolution"], {"streams": True}),
        ("llama2-7b", ["search=none", "pattern=50%"], {}),
        ("llama2-7b", ["search=none", "prune=wanda"], {}),
        ("llama2-7b", ["search=none", "tune=bqpo", "tune_units=submodules"], {}),
        ("llama2-7b", ["search=none", "tune=bqpo+distil"], {}),
        ("llama2-7b", [], {"recipe": "dense-w4"}),
        ("llama2-7b", [], {"recipe": "auto", "target": {"decode": 2}}),
    ],
)
def test_nothing_is_said_of_what_was_not_measured(arch: str, settings: Sequence[str], how: Mapping[str, Any]):
    assert span(arch, *settings, layers=1, **how) is None


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
    assert duration(Span.of(1200.0)) == "; the GPU works for some 20 minutes"
    assert duration(Span(61.0, 89.0)) == "; the GPU works for some 61 to 89 s"
    assert duration(Span(90.1, 500.0)) == "; the GPU works for some 2 to 8 minutes"
    assert duration(None) == ""

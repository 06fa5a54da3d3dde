"""Offline lm-eval tasks on a compressed directory, against lm-eval's HFLM on the unpacked model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse import api
from semisparse.errors import InputError
from semisparse.integrations.transformers import sparse_layers
from tests.models import byte_tokenizer
from tests.serving import Served, one, write

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-serving sets it up")

CHOICES = [{"question": f"{i} and {i} are", "right": i % 2, "wrong": [str(2 * i), str(i + 7)]} for i in range(12)]
TEXTS = [{"text": f"line {i} of a text, " * (i + 1)} for i in range(4)]

TASKS = {
    "sums": """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{wrong}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "lines": """
task: lines
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "continued": """
task: continued
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{right}}"
generation_kwargs: {max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """Paths of one YAML file per kind of task, with their data beside them."""
    files = []
    for name, text in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        rows = TEXTS if name == "lines" else CHOICES
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = tmp_path / f"{name}.yaml"
        file.write_text(text.replace("DATA", str(data)))
        files.append(str(file))
    return files


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with dense layers."""
    dense = copy.deepcopy(model)
    for name, layer in sparse_layers(dense).items():
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.weight.data = layer.weight.to(model.dtype)
        if layer.bias is not None:
            linear.bias.data = layer.bias.data
        dense.set_submodule(name, linear)
    return dense


@pytest.mark.parametrize(("form", "pattern"), [("bitmask", "32:64"), ("bitmask", "70%"), ("slide24", "6:8")])
def test_results_are_those_of_the_unpacked_model(form: str, pattern: str, tmp_path: Path, tasks: list[str]):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    directory = write(Served("model", form, one(pattern)), tmp_path / "model")
    dense = unpacked(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    assert not sparse_layers(dense)
    manager = TaskManager(include_defaults=False)
    adapter = HFLM(pretrained=dense, tokenizer=byte_tokenizer())
    expected = lm_eval.simple_evaluate(adapter, tasks=tasks, task_manager=manager)["results"]
    results = api.evaluate(directory, tasks=tasks)["tasks"]
    assert results.keys() == expected.keys() == TASKS.keys()
    compared = 0
    for task, metrics in results.items():
        for metric, value in metrics.items():
            # Likelihoods are float32 sums in another order; accuracies change only if two choices tie.
            assert value == pytest.approx(expected[task][metric], rel=1e-5), (task, metric)
            compared += "," in metric and "stderr" not in metric
    assert compared == 5


def test_the_command_prints_the_results(run, tmp_path: Path, tasks: list[str]):
    directory = write(Served("model", "bitmask", one("32:64")), tmp_path / "model")
    outcome = run("eval", directory, "--tasks", ",".join(tasks), "--json")
    assert outcome.status == 0
    assert (
        outcome.json["tasks"]["sums"]["acc,none"] == api.evaluate(directory, tasks=tasks)["tasks"]["sums"]["acc,none"]
    )


def test_an_unknown_task_is_named(tmp_path: Path):
    directory = write(Served("model", "bitmask", one("32:64")), tmp_path / "model")
    with pytest.raises(InputError, match=r"no task no-such-task, missing\.yaml, and there is no such YAML file"):
        api.evaluate(directory, tasks=["no-such-task", "missing.yaml"])

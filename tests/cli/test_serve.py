"""``semisparse serve`` up to the start of the server."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semisparse.cli import serve
from semisparse.errors import SemisparseError
from semisparse.runtime.device import DeviceFacts
from tests.serving import Served, one, write


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The servers that were started: none, but their commands are listed."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    monkeypatch.setattr("semisparse.cli.serve._server", lambda: ("some server", ("program", "serve")))
    return commands


@pytest.mark.parametrize(
    "written",
    [
        ("--port", 81, "--", "--max-model-len", 64, "-tp", 2),
        ("--port", 81, "--max-model-len", 64, "-tp", 2),
        ("--max-model-len", 64, "--port", 81, "-tp", 2),
    ],
)
def test_the_directory_port_and_further_arguments_are_passed_on(run, started, compressed: Path, written):
    outcome = run("serve", compressed, *written)
    assert outcome.status == 0
    assert started == [["program", "serve", str(compressed), "--port", "81", "--max-model-len", "64", "-tp", "2"]]
    assert "by some server" in outcome.err
    assert "curl http://localhost:81/v1/completions" in outcome.err
    assert f'-d \'{{"model": "{compressed}", "prompt": "Hello", "max_tokens": 32}}\'' in outcome.err


@pytest.mark.parametrize("kept", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_example_is_a_chat_where_the_tokenizer_has_a_template(run, started, compressed: Path, kept: str):
    """Servers refuse a chat with a model that has none."""
    template = "{{ messages }}"
    (compressed / kept).write_text(json.dumps({"chat_template": template}) if kept.endswith("json") else template)
    outcome = run("serve", compressed)
    assert outcome.status == 0
    assert "curl http://localhost:8000/v1/chat/completions" in outcome.err


def test_a_gpu_that_is_too_small_is_refused_before_vllm_starts(run, started, compressed: Path, monkeypatch):
    monkeypatch.setattr("semisparse.cli.serve._server", lambda: ("vLLM", serve.VLLM))
    facts = DeviceFacts("Some GPU", "cuda", "sm_90a", 1, 1, 100, "", (9, 0))
    monkeypatch.setattr("semisparse.api.serving.device_facts", lambda device: facts)
    outcome = run("serve", compressed)
    assert outcome.status == 2
    assert not started
    assert "and Some GPU has 0.0 GB: serve them on more GPUs" in " ".join(outcome.err.split())


def test_ranks_that_cannot_cut_a_layer_are_refused_before_vllm_starts(run, started, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("semisparse.cli.serve._server", lambda: ("vLLM", serve.VLLM))
    facts = DeviceFacts("Some GPU", "cuda", "sm_90a", 1, 1, 10**9, "", (9, 0))
    monkeypatch.setattr("semisparse.api.serving.device_facts", lambda device: facts)
    directory = write(Served("coarse", "gqs", one("g128@0%"), {"kind": "w4"}), tmp_path / "coarse")
    outcome = run("serve", directory, "--", "--tensor-parallel-size", "4")
    assert outcome.status == 2
    assert not started
    assert "cannot be served on 4 tensor-parallel GPUs" in " ".join(outcome.err.split())


def test_a_directory_of_a_newer_version_is_refused_before_a_server_starts(run, started, compressed: Path):
    config = json.loads((compressed / "config.json").read_text())
    config["quantization_config"]["version"] = 99
    (compressed / "config.json").write_text(json.dumps(config))
    outcome = run("serve", compressed)
    assert outcome.status == 2
    assert not started
    assert "checkpoint version 99 is unknown; this semisparse reads version 1" in " ".join(outcome.err.split())


def test_the_command_line_starts_without_torch():
    """`--version` and `--help` import nothing that takes seconds."""
    found = subprocess.run([sys.executable, "-c", "import sys, semisparse.cli; sys.exit('torch' in sys.modules)"])
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("vllm", "gpu", "transformers", "says"),
    [
        (True, True, True, "vLLM"),
        (True, False, True, "transformers' own server (torch sees no GPU here)"),
        (False, True, True, "transformers' own server (vLLM is not installed)"),
        (False, False, False, None),
    ],
)
def test_vllm_serves_where_it_is_installed_and_a_gpu_is_there(monkeypatch, vllm, gpu, transformers, says: str | None):
    specs = {"vllm": object() if vllm else None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: specs.get(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: transformers)
    if says is None:
        with pytest.raises(SemisparseError, match="no server can be started: vLLM needs a GPU and"):
            serve._server()
        return
    name, command = serve._server()
    assert name == says
    assert command == (serve.VLLM if says == "vLLM" else serve.TRANSFORMERS)


def test_an_option_before_the_directory_is_refused(run, started, compressed: Path):
    outcome = run("serve", "--max-model-len", 64, compressed)
    assert outcome.status == 2
    assert not started
    assert "give the model directory first" in outcome.err


def test_a_folder_without_a_model_is_refused(run, started, tmp_path: Path):
    outcome = run("serve", tmp_path)
    assert outcome.status == 2
    assert not started
    assert "is no model directory: it has no config.json" in " ".join(outcome.err.split())

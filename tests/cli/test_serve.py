"""``semisparse serve`` up to the start of the server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import semisparse
from tests.models import byte_tokenizer, random_model


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("serve") / "out"
    settings = ("search=none", "prune=magnitude")
    semisparse.compress(random_model("llama"), byte_tokenizer(), "rheosparse", None, out, settings=settings)
    return out


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The servers that were started: none, but their commands are listed."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    monkeypatch.setattr("semisparse.cli.serve._server", lambda: ("some server", ("program", "serve")))
    return commands


def test_the_directory_port_and_further_arguments_are_passed_on(run, started, compressed: Path):
    outcome = run("serve", compressed, "--port", 81, "--", "--max-model-len", 64)
    assert outcome.status == 0
    assert started == [["program", "serve", str(compressed), "--port", "81", "--max-model-len", "64"]]
    assert "by some server" in outcome.err
    assert "curl http://localhost:81/v1/chat/completions" in outcome.err


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

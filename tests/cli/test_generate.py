"""`generate` that is cut short: Ctrl-C, and a reader that has gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semisparse import cli
from semisparse.cli import output
from semisparse.engine import Engine

ON_CPU = ("--device", "cpu", "--max-new-tokens", "8")


def test_control_c_prints_what_came(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(self, prompts, new, on_text, **options):
        on_text(0, "x = ")
        on_text(0, "1")
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    monkeypatch.setattr(output, "_said_interrupted", False)
    monkeypatch.setattr(sys, "argv", ["semisparse", "generate", str(model), "--prompt", "def f", *ON_CPU])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (130, "def fx = 1\n")
    assert printed.err.splitlines()[-1] == "interrupted"


def test_a_reader_that_has_gone_ends_it_in_silence(model: Path):
    command = [sys.executable, "-m", "semisparse", "generate", str(model), "--prompt", "a", *ON_CPU]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as started:
        started.stdout.close()
        errors = started.stderr.read().decode()
    assert (started.returncode, errors) == (141, "")

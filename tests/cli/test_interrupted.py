"""Ctrl-C while a command imports modules: one sentence and status 130, at the same moments in each run."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

INTERRUPT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
"""A sitecustomize.py: sends SIGINT when a module is about to be imported."""

VERBS = (
    ("compress", "no", "--recipe", "gqsa", "--out", "out"),
    ("frontier", "no", "--calib", "no"),
    ("eval", "no"),
    ("generate", "no", "--prompt", "a"),
    ("generate", "no", "--chat"),
    ("serve", "no"),
    ("export", "no", "--to", "dense", "--out", "out"),
    ("warm", "no"),
    ("inspect", "no", "--verify"),
    ("formats",),
    ("plan", "--shape", "64,64"),
    ("bench", "kernels"),
    ("bench", "model", "no"),
    ("demo",),
)

# `torch` is looked for before the verb runs, in order to know where its bytecode is.
EARLY = (
    "semisparse.cli",
    "typer",
    "semisparse.cli.bench",
    "rich.console",
    "semisparse.cli.warm",
    "rich.table",
    "torch",
)
LATE = ("torch._C", "torch.nn", "safetensors", "semisparse.formats.base")


@pytest.mark.parametrize(
    ("verb", "module"),
    [
        *((VERBS[0], module) for module in EARLY),
        *((verb, "torch._utils") for verb in VERBS[::4]),
        *(
            pytest.param(verb, "torch._utils", marks=pytest.mark.slow)
            for number, verb in enumerate(VERBS)
            if number % 4
        ),
        *((VERBS[8], module) for module in LATE),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each[:2]),
)
def test_control_c_while_modules_are_imported(verb: tuple[str, ...], module: str, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "config.json").write_text("{}")  # `serve` looks for it before it imports torch
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "semisparse", *verb],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "INTERRUPTED_AT": module},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # pytest's shell may ignore it
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.strip().splitlines()[-1].startswith("interrupted"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_command_that_ignores_sigint_goes_on(tmp_path: Path):
    """As a shell makes those with & ignore it."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "semisparse", "--version"],
        env=os.environ | {"PYTHONPATH": path, "INTERRUPTED_AT": "typer"},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )
    assert (ended.returncode, ended.stderr) == (0, "")

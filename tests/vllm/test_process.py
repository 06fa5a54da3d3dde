"""benchmarks/vllm_process.py: messages of a forked process, what is kept of one that dies, and that all of it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import vllm_process

    return vllm_process


def works(turn: Any) -> None:
    turn.say("ready", 1)
    turn.wait()
    print("measured")
    turn.say("latency", 2.5)
    turn.say("done")


def dies(turn: Any) -> None:
    turn.say("latency", 2.5)
    raise ValueError("no memory")


def hangs(turn: Any) -> None:
    child = os.fork()
    if child:
        turn.say("child", child)
    time.sleep(60)


def test_a_process_measures_at_its_turn(processes: ModuleType, tmp_path: Path):
    child = processes.Child("dense", tmp_path / "log", works)
    assert child.messages("ready", 10) == {"ready": 1}
    assert child.messages("done", 0.2) is None
    child.go()
    assert child.messages("done", 10) == {"latency": 2.5, "done": None}
    child.end(10)
    assert (tmp_path / "log").read_text() == "measured\n"


def test_what_a_process_sent_before_it_died_is_kept(processes: ModuleType, tmp_path: Path):
    child = processes.Child("dense", tmp_path / "log", dies)
    assert child.messages("done", 10) is None
    assert child.partial == {"latency": 2.5}
    child.go()
    child.end()
    assert "ValueError: no memory" in (tmp_path / "log").read_text()


def test_a_process_that_hangs_is_killed_with_its_children(processes: ModuleType, tmp_path: Path):
    child = processes.Child("dense", tmp_path / "log", hangs)
    grandchild = child.messages("child", 10)["child"]
    assert child.messages("done", 0.2) is None
    child.end()
    assert not child.process.is_alive()
    state = Path(f"/proc/{grandchild}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""The command line as a process: its exit status, its output, and what runs at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import atexit, sys
from semisparse import cli
from semisparse.cli import process
atexit.register(print, "registered")
def main():
    print("output" * 10_000)
    {ending}
process.main = main
process.run()
"""


def run(ending: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", COMMAND.format(ending=ending)]
    return subprocess.run(command, text=True, timeout=120, check=False, **{"capture_output": True, **options})


@pytest.mark.parametrize(
    ("ending", "status"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(2)", 2), ("raise SystemExit(141)", 141), ("sys.exit('why')", 1)],
)
def test_status_and_output_are_those_of_any_process(ending: str, status: int):
    done = run(ending)
    assert done.returncode == status
    assert done.stdout == "output" * 10_000 + "\nregistered\n"
    assert done.stderr == ("why\n" if "why" in ending else "")


def test_the_interpreter_is_not_taken_apart():
    """An object that outlives `main` is not finalised: with torch's modules that takes most of a second."""
    done = run("class Kept:\n        def __del__(self): print('finalised')\n    sys.modules['__main__'].kept = Kept()")
    assert (done.returncode, "finalised" in done.stdout) == (0, False)


def test_an_error_that_is_not_an_exit_has_its_traceback():
    done = run("raise ValueError('unexpected')")
    assert done.returncode == 1
    assert "ValueError: unexpected" in done.stderr
    assert "registered" in done.stdout


def test_nor_is_it_taken_apart_after_an_error():
    """Triton's and nanobind's modules report 30 lines of leaks then."""
    kept = "class Kept:\n        def __del__(self): print('finalised')\n    sys.modules['__main__'].kept = Kept()"
    done = run(f"{kept}\n    raise ValueError('unexpected')")
    assert (done.returncode, "finalised" in done.stdout) == (1, False)


def test_a_closed_pipe_and_a_full_disk_are_reported_as_python_does(tmp_path: Path):
    assert run("sys.stdout = None").returncode == 0
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = run("pass", capture_output=False, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode
        assert "No space left" in done.stderr


@pytest.mark.parametrize(
    "closed", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("2>&-", ">&-")), ">&- 2>&-"]
)
def test_a_closed_stream_is_no_error(closed: str):
    done = subprocess.run(f"{sys.executable} -m semisparse formats --json {closed}", shell=True, capture_output=True)
    assert done.returncode == 0
    assert done.stderr == b""


def test_text_that_the_encoding_of_stdout_lacks_is_escaped():
    done = run("print('\\u6f22')", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u6f22" in done.stdout

"""What happens while a command imports torch."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semisparse.runtime import cuda_context, cuda_libraries
from tests.models import random_model

IMPORTING = """
import gc, sys
from pathlib import Path
from semisparse.api import start
assert "torch" not in sys.modules, "imported too early"
begun = []
start.read_ahead_in_background = lambda path: begun.append(("read", str(path), "torch" in sys.modules))
start.create_in_background = lambda: begun.append(("context", "torch" in sys.modules))
with start.importing(Path("model"), sys.argv[1]):
    collects = gc.isenabled()
    import torch
print(begun, collects, gc.isenabled(), gc.get_freeze_count() > 10_000)
with start.importing(Path("model"), sys.argv[1]):
    print(len(begun), gc.isenabled())
"""


@pytest.mark.parametrize(("device", "context"), [("cpu", ""), ("auto", ", ('context', False)")])
def test_the_disk_and_the_gpu_begin_before_torch_is_imported(device: str, context: str):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, device], capture_output=True, text=True, timeout=120, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == f"[('read', 'model', False){context}] False True True"
    assert second == f"{2 if context else 1} True", "torch was there already: nothing is done"


class Driver:
    """Records the driver's calls, of which ``failing`` fails."""

    def __init__(self, failing: str = ""):
        self.calls: list[str] = []
        self._failing = failing

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append(name) or (1 if name == self._failing else 0)


def test_the_context_of_the_first_gpu_is_created(monkeypatch: pytest.MonkeyPatch):
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    cuda_context.create_in_background().join()
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_without_a_gpu_or_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capfd):
    driver = Driver("cuInit")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    cuda_context.create_in_background().join()
    assert driver.calls == ["cuInit"]

    def absent(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    cuda_context.create_in_background().join()
    assert capfd.readouterr() == ("", "")


def test_reading_ahead_says_nothing_about_a_directory_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from semisparse.checkpoint import files

    read = []
    monkeypatch.setattr(files, "read_ahead", lambda paths: read.append([path.name for path in paths]))
    files.read_ahead_in_background(tmp_path / "absent").join()
    random_model("llama").save_pretrained(tmp_path / "model")
    files.read_ahead_in_background(tmp_path / "model").join()
    assert read == [["model.safetensors"]]


def test_the_libraries_are_loaded_while_the_block_imports(tmp_path: Path):
    (tmp_path / "torch.py").write_text("")  # imported in no time: it is in the working directory
    code = IMPORTING.replace("begun = []", "begun = []\nstart._libraries = lambda: Libraries").replace(
        "from semisparse.api import start",
        "from semisparse.api import start\n"
        "class Libraries:\n"
        "    def load_in_background(): begun.append('libraries')\n"
        "    def wait(): begun.append(('waited', 'torch' in sys.modules))",
    )
    later = code.replace("sys.argv[1]):", "sys.argv[1], waits=False):")
    begun = "[('read', 'model', False), ('context', False), 'libraries'"
    for device, program, expected in (
        ("cuda", code, f"{begun}, ('waited', True)]"),
        ("cuda", later, f"{begun}]"),
        ("cpu", code, "[('read', 'model', False)]"),
    ):
        command = [sys.executable, "-c", program, device]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.stdout.startswith(expected), done.stderr


def test_loading_the_libraries_without_a_gpu_does_nothing(monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "ones", lambda *size, **named: made.append(size))
    cuda_libraries.load_in_background()
    cuda_libraries.wait()
    assert not made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_calls_that_load_the_libraries_are_ones_that_run(monkeypatch: pytest.MonkeyPatch):
    """A call that fails is swallowed, and what comes after it is not loaded."""
    ended = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ended.append(True))
    cuda_libraries.load_in_background()
    cuda_libraries.wait()
    assert ended == [True]

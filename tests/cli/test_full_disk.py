"""A disk that is full in the middle of a compression: what is finished stays, and ``--resume`` goes on from it.

And a disk that is mounted where the output shall be, or read-only.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
"""Runs a command that may mount file systems, which only it sees."""

SCRIPT = """
disk=$1 size=$2; shift 2
mount -t tmpfs -o size="$size" none "$disk" || exit 9
"$@" --out "$disk/out" && exit 8
ls "$disk/out.partial" > partial
mount -o remount,size=100M "$disk"
"$@" --out "$disk/out" --resume && cp "$disk/out"/* . && ls "$disk" > left
"""


needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs user namespaces, to mount a small disk",
)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(
    ("size", "finished", "writing"),
    [(4096, 0, "out.partial"), (80_000, 3, "out.partial"), (160_000, 4, "out: Error while serializing")],
)
def test_a_disk_that_is_full(run, deep: Path, tmp_path: Path, size: int, finished: int, writing: str):
    """Before the first decoder layer, between two of them, and while the result is written."""
    settings = ["--recipe", "rheosparse", "--set", "prune=magnitude", "--set", "search=none"]
    command = [sys.executable, "-m", "semisparse.cli", "compress", str(deep), *settings]
    (tmp_path / "disk").mkdir()
    (tmp_path / "copy").mkdir()
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", SCRIPT, "sh", str(tmp_path / "disk"), str(size), *command],
        capture_output=True, text=True, timeout=200, check=False,
        cwd=tmp_path / "copy", env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "1000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"error: cannot write {tmp_path}/disk/{writing}" in done.stderr
    assert done.stderr.count("No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "copy" / "partial").read_text().count(".json") == (finished and finished + 1)
    assert (tmp_path / "copy" / "left").read_text() == "out\n"
    assert run("compress", deep, *settings, "--out", tmp_path / "whole").status == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@needs_namespaces
@pytest.mark.parametrize(("options", "place", "sentence"), [("rw", "", "mount point"), ("ro", "out", "not writable")])
def test_an_output_that_is_mounted_or_read_only_is_refused_before_the_work(
    compressed: Path, tmp_path: Path, options: str, place: str, sentence: str
):
    """A container's volume is a mount point: no directory can be renamed to it."""
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o {options} none "$1" || exit 9; shift; exec "$@"'
    command = [sys.executable, "-m", "semisparse.cli", "export", str(compressed), "--to", "dense", "--out"]
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", str(tmp_path / "disk"), *command, str(tmp_path / "disk" / place)],
        capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Loading" not in done.stderr

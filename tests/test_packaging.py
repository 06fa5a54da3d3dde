"""The wheel holds every file that the package reads, and runs where nothing else of the checkout is."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import semisparse

ROOT = Path(semisparse.__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_holds_what_the_checkout_does(tmp_path: Path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    source = tmp_path / "source"  # a build in the checkout would leave files there, and pack those of earlier builds
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("semisparse-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("semisparse/")}
        archive.extractall(tmp_path / "installed")
    assert packed == {name for name in tracked if name.startswith("semisparse/")}
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    for verb in (["--version"], ["formats", "--json"], ["plan", "--shape", "4096,4096", "--gpu", "h200"]):
        run = [sys.executable, "-m", "semisparse.cli", *verb]
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

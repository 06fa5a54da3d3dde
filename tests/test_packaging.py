"""The wheel, built from the source distribution, holds every file that the package reads, and runs alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import semisparse

ROOT = Path(semisparse.__file__).parents[1]


@pytest.mark.slow
@pytest.mark.xdist_group("wheel")  # groups begin first: this one would be the last, alone
def test_the_wheel_holds_what_the_checkout_does(tmp_path: Path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    source = tmp_path / "source"  # a build in the checkout would leave files there, and pack those of earlier builds
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    make_sdist = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", make_sdist, str(tmp_path)], cwd=source, check=True, capture_output=True, timeout=120
    )
    (sdist,) = tmp_path.glob("semisparse-*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("semisparse-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("semisparse/")}
    assert packed == {name for name in tracked if name.startswith("semisparse/")}
    python = install(wheel, tmp_path / "environment")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [python, "-c", "import semisparse; print(semisparse.__file__)"]
    assert (
        str(tmp_path)
        in subprocess.run(where, cwd=tmp_path, env=alone, check=True, capture_output=True, text=True).stdout
    )
    model = next((tmp_path / "environment").glob("lib/*/site-packages/semisparse/demo/chosen"))
    verbs = (["--version"], ["formats", "--json"], ["plan", "--shape", "64,64", "--gpu", "h200"], ["inspect", model])
    for verb in verbs:
        run = [python.with_name("semisparse"), *verb]
        done = subprocess.run(run, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def install(wheel: Path, environment: Path) -> Path:
    """Install a wheel in an environment of its own, which finds the packages that it needs in this one's."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "behind.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=120)
    return python

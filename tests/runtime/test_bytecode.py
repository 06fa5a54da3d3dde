"""Where bytecode is kept: with the packages as a rule, in the cache directory if it would be kept nowhere."""

import os
import subprocess
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

COMMAND = """
import sys
from semisparse.runtime.bytecode import keep_bytecode
keep_bytecode()
import this_is_compiled
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


def run(tmp_path: Path, **environment: str) -> str:
    """Return where a process that imports a module keeps bytecode, and whether it keeps none."""
    (tmp_path / "this_is_compiled.py").write_text("value = 1\n")
    paths = os.pathsep.join((str(Path(__file__).parents[2]), str(tmp_path)))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SEMISPARSE"))}
    cache = {"SEMISPARSE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        capture_output=True, text=True, timeout=60, check=True, env={**kept, **cache, **environment},
    )  # fmt: skip
    return done.stdout.strip()


def test_it_is_kept_in_the_cache_directory_if_python_would_write_none(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    found = run(tmp_path, PYTHONPYCACHEPREFIX=str(tmp_path / "empty"), PYTHONDONTWRITEBYTECODE="1")
    assert found == f"{tmp_path}/cache/bytecode False"
    written = [path.name for path in (tmp_path / "cache" / "bytecode").rglob("*.pyc")]
    assert any(name.startswith("this_is_compiled") for name in written)
    assert not list((tmp_path / "empty").iterdir())


def test_a_folder_that_python_can_write_stays(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    found = run(tmp_path, PYTHONPYCACHEPREFIX=str(tmp_path / "empty"))
    assert found == f"{tmp_path}/empty False"


def test_bytecode_that_is_there_stays(tmp_path: Path):
    torch = find_spec("torch")
    if not Path(cache_from_source(torch.origin)).exists():
        pytest.skip("torch is installed without bytecode")
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1") == "None True"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs to give a directory to another user")
def test_a_directory_of_another_user_is_not_used(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    found = run(tmp_path, PYTHONPYCACHEPREFIX=str(tmp_path / "empty"), PYTHONDONTWRITEBYTECODE="1")
    assert found == f"{tmp_path}/empty True"
    assert not list((tmp_path / "cache").iterdir())

"""The import table holds, and its check works: one violation of each row is planted and must be reported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from semisparse.formats.base import format_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
INDEPENDENT = "a format never imports another format"


def broken(root: Path) -> set[str]:
    """Name the contracts that import-linter finds broken in a tree."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    assert "Contracts" in printed, printed
    text = " ".join(printed.split())
    return {contract["name"] for contract in CONTRACTS if f"{contract['name']} BROKEN" in text}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with one violation of every contract in a module of its own."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "semisparse", root / "semisparse", ignore=shutil.ignore_patterns("__pycache__", "demo"))
    (root / "semisparse" / "demo").mkdir()
    (root / "semisparse" / "demo" / "__init__.py").write_text("")
    for contract in CONTRACTS:
        if contract["type"] == "forbidden":
            source, target = contract["source_modules"][0], contract["forbidden_modules"][-1]
        else:
            source, target = contract["modules"][0], contract["modules"][1]
        module = root / Path(*source.split("."))
        planted = module / "planted.py" if module.is_dir() else module.with_suffix(".py")
        with planted.open("a") as file:
            file.write(f"\nimport {target}\n")
    return root


def test_a_violation_of_each_row_is_refused(tree: Path):
    assert broken(tree) == {contract["name"] for contract in CONTRACTS}


def test_the_table_names_every_format_module_and_folder():
    (independent,) = (contract for contract in CONTRACTS if contract["name"] == INDEPENDENT)
    assert independent["modules"] == [f"semisparse.formats.{name}" for name in format_names()]
    (shared,) = (contract for contract in CONTRACTS if contract["name"].startswith("formats' shared modules"))
    modules = {path.stem for path in (ROOT / "semisparse" / "formats").glob("*.py")} - {"__init__"}
    assert set(shared["source_modules"]) == {f"semisparse.formats.{name}" for name in modules}
    sources = {source for contract in CONTRACTS for source in contract.get("source_modules", ())}
    folders = {path.stem for path in (ROOT / "semisparse").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {f"semisparse.{name}" for name in folders - {"__init__", "__pycache__", "formats"}} <= sources

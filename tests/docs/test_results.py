"""The CSV files in results/ and the pages that name them: neither is without the other."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "semisparse").rglob("*.md"))
    if page.name != "CHANGELOG.md"  # tells of files that were
)
STORED = {path.name for folder in (RESULTS, ROOT / "semisparse") for path in folder.rglob("*.csv")}


def named(page: Path) -> set[str]:
    """Return the names of CSV files on a page, without folders; a name with * is a pattern."""
    return {Path(name).name for name in re.findall(r"[\w./*-]+\.csv\b", page.read_text())}


def test_results_are_described():
    described = named(RESULTS / "README.md")
    names = {path.name for path in RESULTS.rglob("*.csv")}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in described)} == set()


@pytest.mark.parametrize("page", [RESULTS / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path):
    wanted = named(page) - {"OUT.csv"}  # stands for a name in a command
    assert {name for name in wanted if not any(fnmatch(stored, name) for stored in STORED)} == set()

"""The tables on the pages are what the CSV files give, and a figure that differs is found."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    return tables


def test_every_table_is_on_a_page(tables):
    shown = [found[2] for page in tables.PAGES for found in tables.MARKED.finditer((ROOT / page).read_text())]
    assert sorted(shown) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/quality.md", "README.md"])
def test_a_figure_that_differs_from_its_csv_fails(page: str, tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in tables.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()
    text = (tmp_path / page).read_text()
    marked = list(tables.MARKED.finditer(text))[-1]
    digit = marked.start() + re.search(r"\d (?=\|)", marked[0]).start()  # the last of a cell's figure
    wrong = text[:digit] + str(9 - int(text[digit])) + text[digit + 1 :]
    (tmp_path / page).write_text(wrong)
    with pytest.raises(SystemExit, match="tables that differ"):
        tables.main()
    assert (tmp_path / page).read_text() == wrong

"""The tables on the pages are what the CSV files give, and a figure that differs is found."""

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


@pytest.mark.parametrize(
    ("page", "figure", "wrong"),
    [
        ("docs/performance.md", "| 1.44-1.72 |", "| 1.44-1.73 |"),
        ("docs/performance.md", "| 565 |", "| 566 |"),
        ("docs/quality.md", "1.107 / 0.234", "1.107 / 0.233"),
        ("README.md", "| 0.034 |", "| 0.033 |"),
    ],
)
def test_a_figure_that_differs_from_its_csv_fails(
    page: str, figure: str, wrong: str, tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in tables.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    tables.main()
    text = (tmp_path / page).read_text()
    assert figure in text
    (tmp_path / page).write_text(text.replace(figure, wrong))
    with pytest.raises(SystemExit, match="tables that differ"):
        tables.main()
    assert wrong in (tmp_path / page).read_text()

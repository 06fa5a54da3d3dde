"""Reading and writing the rows of a benchmark's CSV. An interrupted run continues from them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of an earlier run; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]], columns: Sequence[str]) -> None:
    """Write all rows, and create the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def result(name: str) -> list[dict[str, str]]:
    """Return the rows of a file in results/.

    Raises:
        OSError: there is no such file.
    """
    with (Path(__file__).parents[1] / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]]).replace("|  |", "| |").replace("|  |", "| |")

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

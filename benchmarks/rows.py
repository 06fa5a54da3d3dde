"""Reading and writing the rows of a benchmark's CSV. An interrupted run continues from them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import product
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


def missing(rows: Sequence[Mapping[str, str]], **wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the combinations of values that no row has.

    Args:
        rows: the rows of an earlier run.
        wanted: the values of each column; those of the last column vary fastest.
    """
    done = {tuple(row[column] for column in wanted) for row in rows}
    return [key for key in product(*wanted.values()) if key not in done]


def add_row(path: Path, rows: list[dict[str, str]], row: dict[str, str]) -> None:
    """Append a row, write all rows, and print the new one. Its keys are the columns."""
    rows.append(row)
    write_rows(path, rows, tuple(row))
    print(*row.values(), flush=True)


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

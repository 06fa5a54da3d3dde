"""What every verb prints with: tables and bars on stderr, one JSON object on stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# Rich assumes 80 columns where stderr is no terminal and would fold the tables of a log file.
console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)


def print_json(values: dict[str, Any]) -> None:
    """Print one JSON object on stdout; a number that is not finite becomes null."""
    print(json.dumps(_finite(values)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stderr, the first column left-aligned and the others right-aligned."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show bars with the time left, on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not shown) as bars:
        yield bars


def fail(sentence: str, status: int) -> NoReturn:
    """Say why on stderr and leave."""
    console.print(f"[bold red]error:[/] {_plain(sentence)}", soft_wrap=True, highlight=False)
    raise SystemExit(status)


def bytes_text(count: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""Printing for all verbs: tables and progress bars on stderr, one JSON object on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

WIDTH = 100
"""Characters per line if stderr is no terminal and the environment has no COLUMNS."""

_on_terminal = sys.stderr is not None and sys.stderr.isatty()  # it is None if it was closed (2>&-)

console = Console(stderr=True, highlight=False, width=None if _on_terminal or "COLUMNS" in os.environ else WIDTH)

INTERRUPTED = 130
"""Exit status after Ctrl-C: typer's, and that of verbs which catch KeyboardInterrupt."""

_said_interrupted = False

MAX_CHARACTERS = 2000
"""Maximum length of an error; the middle of a longer one is left out."""


def print_json(values: dict[str, Any]) -> None:
    """Print one JSON object on stdout. Numbers that are not finite become null."""
    print(json.dumps(_finite(values)))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stderr, with the first column left-aligned and the others right-aligned.

    A column is cut on a terminal that is too narrow for it. In a log file the table is as wide as it needs.
    """
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    needed = Measurement.get(console, console.options.update(max_width=1 << 12), table).maximum
    # `Console.print` takes no width above the console's own.
    wide = console if console.is_terminal else Console(stderr=True, width=max(needed, console.width))
    wide.print(table, crop=False)


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Yield progress bars on stderr, with elapsed and remaining time; hidden if ``shown`` is false."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not shown) as bars:
        try:
            yield bars
        except BaseException:
            bars.live.transient = True  # no bar that has stopped stays above the error
            raise


def fill(bars: Progress, task: TaskID) -> None:
    """Show a task as done: progress is reported at the beginning of a step, so a bar never shows its last one."""
    total = bars.tasks[task].total or 1
    bars.update(task, completed=total, total=total)


def fail(sentence: str, status: int) -> NoReturn:
    """Print an error on stderr and exit."""
    print_error(sentence)
    raise SystemExit(status)


def say_interrupted(sentence: str = "interrupted") -> None:
    """Print on stderr that Ctrl-C ended the command, once: a verb's own sentence comes before the general one."""
    global _said_interrupted
    if not _said_interrupted:
        console.print(sentence)
    _said_interrupted = True


def speak(sentence: str) -> None:
    """Print an error on stderr, even if this rank's console is quiet because another rank prints."""
    console.quiet = False
    print_error(sentence)


def print_error(sentence: str) -> None:
    """Print an error on stderr."""
    if len(sentence) > MAX_CHARACTERS:
        sentence = f"{sentence[: MAX_CHARACTERS // 2]} ... {sentence[-MAX_CHARACTERS // 2 :]}"
    # Text from a file may contain terminal escape sequences.
    printable = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in sentence)
    console.print(f"[bold red]error:[/] {_escaped(printable)}", soft_wrap=True)


def bytes_text(count: float) -> str:
    """Return a number of bytes with three significant digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _escaped(text: str) -> str:
    """Escape rich markup."""
    return text.replace("[", "\\[")


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, in nested lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

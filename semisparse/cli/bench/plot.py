"""``semisparse bench plot``: draw the plots of a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.output import console


def plot(
    results: Annotated[
        Path, typer.Argument(help="A CSV file of bench kernels, model or parallel, or of one format's benchmark.")
    ],
    out: Annotated[Path | None, typer.Option(help="The folder for the PNG files; that of the CSV by default.")] = None,
) -> None:
    """Draw the plots of a CSV file: speed-ups, roofline and storage of kernels, or times, as its columns allow.

    Example: `semisparse bench plot results/h200/engine.csv --out plots`
    """
    from semisparse.bench.plot import plot_csv

    for path in plot_csv(results, out or results.parent):
        console.print(str(path))

"""``semisparse bench plot``: draw the plots of a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.output import console


def plot(
    results: Annotated[Path, typer.Argument(help="A CSV file that `bench kernels` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The folder for the PNG files; that of the CSV by default.")] = None,
) -> None:
    """Draw the plots of a CSV file of `bench kernels`."""
    from semisparse.bench.kernels import Measurement
    from semisparse.bench.plot import plot_all
    from semisparse.bench.table import read_csv

    for path in plot_all(read_csv(results, Measurement), out or results.parent):
        console.print(str(path))

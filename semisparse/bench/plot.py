"""The plots of a CSV file, by its columns."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path

from semisparse.bench.kernels import Measurement
from semisparse.bench.model import ModelSpeed
from semisparse.bench.plot_kernels import plot_kernels
from semisparse.bench.plot_systems import plot_models, plot_vectors, plot_ways
from semisparse.bench.table import read_csv
from semisparse.errors import InputError

WAYS = {"n", "k", "dtype", "way", "us", "machine"}
"""Columns of a CSV file that `plot_ways` draws."""

VECTORS = {"what", "dtype", "m", "n", "k", "pattern", "kernel", "speedup"}
"""Columns of a CSV file that `plot_vectors` draws."""


def plot_csv(path: Path, folder: Path) -> list[Path]:
    """Draw the plots of a CSV file of `bench kernels`, `bench model`, `bench parallel`, or of one format's benchmark.

    Args:
        path: the CSV file.
        folder: the folder for the PNG files, which have the CSV's name unless it is of `bench kernels`.
    Raises:
        InputError: the file cannot be read, has no rows, or has other columns.
        SemisparseError: matplotlib is not installed.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise InputError(f"{path} has no rows to draw")
    columns, picture = set(rows[0]), folder / f"{path.stem}.png"
    if {field.name for field in fields(Measurement)} <= columns:
        return plot_kernels(read_csv(path, Measurement), folder)
    if {field.name for field in fields(ModelSpeed)} <= columns:
        return [plot_models(rows, picture)]
    if columns >= WAYS:
        return [plot_ways(rows, picture)]
    if columns >= VECTORS:
        return [plot_vectors(rows, picture)]
    raise InputError(
        f"{path} has the columns {', '.join(rows[0])}; a plot takes those of bench kernels, bench model or bench "
        f"parallel, or at least {', '.join(sorted(WAYS))}, or {', '.join(sorted(VECTORS))}"
    )

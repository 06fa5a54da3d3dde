"""``semisparse bench compare``: predicted beside measured times."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import print_json, print_table


def compare(
    results: Annotated[Path, typer.Argument(help="A CSV file that `bench kernels` wrote.")],
    gpu: Annotated[str, typer.Option(help="The machine that it was measured on, by its name in `plan`.")] = "auto",
    as_json: Json = False,
) -> None:
    """Compare the times that `plan` predicts with measured ones.

    Example: `semisparse bench compare kernels.csv --gpu h200`
    """
    from semisparse.bench import compare as comparison
    from semisparse.bench.kernels import Measurement
    from semisparse.bench.machines import find_machine
    from semisparse.bench.table import read_csv

    rows = comparison.compare(read_csv(results, Measurement), find_machine(gpu))
    errors = comparison.median_errors(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "median_error": errors})
        return
    cells = [
        [
            row.candidate,
            f"{row.n}, {row.k}",
            str(row.m),
            f"{row.us:,.1f}",
            f"{row.predicted_us:,.1f}",
            f"{row.error:+.0%}",
        ]
        for row in rows
    ]
    print_table("Predicted and measured", ["format", "N, K", "M", "us", "predicted us", "error"], cells)
    print_table("Median absolute error", ["format", "error"], [[name, f"{e:.0%}"] for name, e in errors.items()])

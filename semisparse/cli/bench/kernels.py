"""``semisparse bench kernels``: time every kernel on every shape."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisparse.cli.arguments import (
    Device,
    Dtype,
    Formats,
    Json,
    Patterns,
    Shapes,
    TokenCounts,
    comma_separated,
    dtype_named,
    positive_integers,
    shape_names,
    writable_file,
)
from semisparse.cli.output import console, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from semisparse.bench.kernels import Measurement, Skipped


def kernels(
    shapes: Shapes = "llama2-7b",
    tokens: TokenCounts = "1,8,16,128,1024,4096",
    formats: Formats = None,
    patterns: Patterns = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(callback=writable_file, help="The CSV file to write; plots are written beside it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify and time every kernel on every shape, beside dense and the roofline floor.

    The floor is the time of the bytes or the operations alone. The CSV file and --json also have the 10th and 90th
    percentile, bits per weight and the machine.

    Example: `semisparse bench kernels --shapes 4096,4096 --tokens 1,16 --formats dense,bitmask --out kernels.csv`
    """
    from semisparse.api import pick_device
    from semisparse.bench.kernels import Measurement, Setup, measure_layer
    from semisparse.bench.machines import find_machine
    from semisparse.bench.plot_kernels import plot_kernels
    from semisparse.bench.roofline import candidates
    from semisparse.bench.shapes import layer_shapes
    from semisparse.bench.table import write_csv

    target = pick_device(device)
    compared = candidates(comma_separated(formats), comma_separated(patterns))
    layers = [(name, layer) for name in shape_names(shapes) for layer in layer_shapes(name)]
    counts = positive_integers(tokens, "--tokens")
    machine = find_machine(target.type)
    measurements: list[Measurement] = []
    skipped: list[Skipped] = []
    with progress_bar(not as_json) as bars:
        task = bars.add_task("layers", total=len(layers))
        for name, layer in layers:
            setup = Setup(name, dtype_named(dtype), target, machine)
            for result in measure_layer(setup, layer, counts, compared):
                if isinstance(result, Measurement):
                    measurements.append(result)
                else:
                    skipped.append(result)
            if out is not None and measurements:
                write_csv(out, measurements)
            bars.advance(task)
    if out is not None and measurements:
        plot_kernels(measurements, out.parent)
    if as_json:
        print_json({"rows": [asdict(row) for row in measurements], "skipped": [asdict(row) for row in skipped]})
    else:
        _show(measurements, skipped)
    if not measurements:
        raise SystemExit(1)  # the table and --json have the reasons


def _show(measurements: list[Measurement], skipped: list[Skipped]) -> None:
    columns = ["format", "kernel", "N, K", "M", "us", "floor us", "speed-up", "error"]
    rows = [
        [
            row.candidate.label,
            row.kernel,
            f"{row.n}, {row.k}",
            str(row.m),
            f"{row.us:,.1f}",
            f"{row.floor_us:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.error:.1e}",
        ]
        for row in measurements
    ]
    title = "Nothing could be measured"
    if measurements:
        title = f"{measurements[0].machine}, {measurements[0].software}, {measurements[0].dtype}"
    print_table(title, columns, rows)
    ran = {row.candidate.label for row in measurements}
    for reason in dict.fromkeys(f"{s.candidate} {s.kernel}: {s.reason}" for s in skipped if s.candidate not in ran):
        console.print(f"[dim]not run: {reason}[/]")

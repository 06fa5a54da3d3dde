"""``semisparse plan``: what sparsity should gain, before anything is compressed."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from semisparse.bench.machines import find_machine
from semisparse.bench.plan import Plan, make_plan
from semisparse.bench.roofline import candidates
from semisparse.bench.shapes import layer_shapes
from semisparse.cli.arguments import DTYPES, dtype_named, numbers, words
from semisparse.errors import InputError

app = typer.Typer()


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A model directory, or an architecture such as llama2-7b.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="N,K of one layer, instead of a model.")] = None,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200, rtx3090, rtx4090, rtx5080, cpu or auto.")] = "auto",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens M, by commas.")] = "1,16,4096",
    formats: Annotated[str | None, typer.Option(help="Formats, by commas; all by default.")] = None,
    patterns: Annotated[str | None, typer.Option(help="Patterns, by commas; the recipes' own by default.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of weights and activations: {', '.join(DTYPES)}.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict what each format gains over dense on a machine, by the roofline model."""
    if (model is None) == (shape is None):
        raise InputError("plan takes a model or --shape N,K, one of the two")
    made = make_plan(
        layer_shapes(str(model or shape)),
        numbers(tokens, "--tokens"),
        candidates(words(formats), words(patterns)),
        dtype_named(dtype),
        find_machine(gpu),
    )
    if as_json:
        typer.echo(json.dumps(_as_dict(made)))
    else:
        _show(made, Console())


def _as_dict(made: Plan) -> dict[str, object]:
    return {
        "gpu": made.machine.name,
        "source": made.machine.source,
        "bandwidth": made.machine.bandwidth,
        "peaks": dict(made.machine.peaks),
        "rows": [row.as_dict() for row in made.rows],
        "totals": [
            {"m": m, "candidate": label, "us": seconds * 1e6, "speedup": gain}
            for (m, label), (seconds, gain) in made.totals().items()
        ],
        "best": [{"layer": name, "m": m, "candidate": row.candidate.label} for (name, m), row in made.best().items()],
        "left_out": made.left_out,
        "sentences": made.sentences(),
    }


def _show(made: Plan, console: Console) -> None:
    machine = made.machine
    peaks = ", ".join(f"{unit} {peak / 1e12:,.4g}" for unit, peak in machine.peaks.items())
    console.print(f"{machine.name}: reads {machine.bandwidth / 1e12:.3g} TB/s; T(FL)OP/s: {peaks}")
    console.print(f"Figures from: {machine.source}.", style="dim")
    one_layer = len({row.layer for row in made.rows}) == 1
    console.print(_layer_table(made) if one_layer else _model_table(made))
    if not one_layer:
        console.print(_best_table(made))
    for label, reason in made.left_out.items():
        console.print(f"Left out: {label}: {reason}", style="dim")
    for sentence in made.sentences():
        console.print(sentence)
    console.print(
        "Predictions are at the roofline, accuracy apart: 8 and 4 bits and sparsity all cost some.", style="dim"
    )


def _layer_table(made: Plan) -> Table:
    layer = made.rows[0].layer
    table = Table(title=f"N, K = {layer.n:,}, {layer.k:,}")
    table.add_column("M", justify="right")
    table.add_column("format")
    for name in ("bits", "MB", "GFLOP", "FLOP/byte", "us", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("bound by")
    for row in made.rows:
        found = row.estimate
        table.add_row(
            f"{row.m:,}",
            row.candidate.label,
            f"{row.bits_per_weight:.2f}",
            f"{found.bytes / 1e6:,.2f}",
            f"{found.operations / 1e9:,.3g}",
            f"{found.operations / found.bytes:,.3g}",
            f"{found.seconds * 1e6:,.1f}",
            f"{row.speedup:.2f}",
            found.bound,
        )
    return table


def _model_table(made: Plan) -> Table:
    table = Table(title="All linear layers, the head left out")
    table.add_column("M", justify="right")
    table.add_column("format")
    for name in ("bits", "MB of weights", "us", "speed-up"):
        table.add_column(name, justify="right")
    for (m, label), (seconds, gain) in made.totals().items():
        rows = [row for row in made.rows if row.m == m and row.candidate.label == label]
        weights = sum(row.layer.count * row.layer.n * row.layer.k for row in rows)
        bits = sum(row.layer.count * row.layer.n * row.layer.k * row.bits_per_weight for row in rows)
        table.add_row(
            f"{m:,}", label, f"{bits / weights:.2f}", f"{bits / 8e6:,.1f}", f"{seconds * 1e6:,.1f}", f"{gain:.2f}"
        )
    return table


def _best_table(made: Plan) -> Table:
    table = Table(title="Fastest for each layer")
    for name in ("layer", "N, K"):
        table.add_column(name)
    table.add_column("M", justify="right")
    table.add_column("fastest")
    table.add_column("speed-up", justify="right")
    for row in made.best().values():
        layer = row.layer
        table.add_row(layer.names, f"{layer.n:,}, {layer.k:,}", f"{row.m:,}", row.candidate.label, f"{row.speedup:.2f}")
    return table

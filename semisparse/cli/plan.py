"""``semisparse plan``: what sparsity should gain, before anything is compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.arguments import DTYPES, dtype_named, numbers, words
from semisparse.cli.output import bytes_text, console, print_json, print_table
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.bench.plan import Plan


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
    from semisparse.bench.machines import find_machine
    from semisparse.bench.plan import make_plan
    from semisparse.bench.roofline import candidates
    from semisparse.bench.shapes import layer_shapes

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
        print_json(_as_dict(made))
    else:
        _show(made)


def _as_dict(made: Plan) -> dict[str, Any]:
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


def _show(made: Plan) -> None:
    machine = made.machine
    peaks = ", ".join(f"{unit} {peak / 1e12:,.4g}" for unit, peak in machine.peaks.items())
    console.print(f"{machine.name}: reads {machine.bandwidth / 1e12:.3g} TB/s; T(FL)OP/s: {peaks}", highlight=False)
    console.print(f"[dim]Figures from: {machine.source}.[/]", highlight=False)
    if len({row.layer for row in made.rows}) == 1:
        _show_layer(made)
    else:
        _show_model(made)
        _show_best(made)
    for label, reason in made.left_out.items():
        console.print(f"[dim]Left out: {label}: {reason}[/]", highlight=False)
    for sentence in made.sentences():
        console.print(sentence, highlight=False)
    console.print(
        "[dim]Predictions: `semisparse bench kernels` measures, `bench compare` says how far off these are. "
        "Accuracy is another matter.[/]"
    )


def _show_layer(made: Plan) -> None:
    layer = made.rows[0].layer
    told = any(row.estimate.strategy for row in made.rows)
    rows = [
        [
            row.candidate.label,
            f"{row.m:,}",
            f"{row.bits_per_weight:.2f}",
            f"{row.estimate.bytes / 1e6:,.2f}",
            f"{row.estimate.operations / 1e9:,.3g}",
            f"{row.estimate.operations / row.estimate.bytes:,.3g}",
            f"{row.estimate.seconds * 1e6:,.1f}",
            f"{row.speedup:.2f}",
            row.estimate.bound,
            *([row.estimate.strategy] if told else []),
        ]
        for row in made.rows
    ]
    columns = ["format", "M", "bits", "MB", "GFLOP", "FLOP/byte", "us", "speed-up", "bound by"]
    columns += ["strategy"] if told else []
    print_table(f"N, K = {layer.n:,}, {layer.k:,}", columns, rows)


def _show_model(made: Plan) -> None:
    rows = []
    for (m, label), (seconds, gain) in made.totals().items():
        own = [row for row in made.rows if row.m == m and row.candidate.label == label]
        weights = sum(row.layer.count * row.layer.n * row.layer.k for row in own)
        bits = sum(row.layer.count * row.layer.n * row.layer.k * row.bits_per_weight for row in own)
        rows.append(
            [label, f"{m:,}", f"{bits / weights:.2f}", bytes_text(bits / 8), f"{seconds * 1e6:,.1f}", f"{gain:.2f}"]
        )
    columns = ["format", "M", "bits", "weights", "us", "speed-up"]
    print_table("All linear layers, the head left out", columns, rows)


def _show_best(made: Plan) -> None:
    rows = [
        [
            row.layer.names,
            f"{row.layer.n:,}, {row.layer.k:,}",
            f"{row.m:,}",
            row.candidate.label,
            f"{row.speedup:.2f}",
        ]
        for row in made.best().values()
    ]
    print_table("Fastest for each layer", ["layer", "N, K", "M", "fastest", "speed-up"], rows)

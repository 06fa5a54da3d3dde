"""``semisparse plan``: predict the speed-up of each format before anything is compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.arguments import (
    Dtype,
    Formats,
    Json,
    Patterns,
    TokenCounts,
    comma_separated,
    dtype_named,
    positive_integers,
)
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
    tokens: TokenCounts = "1,16,4096",
    formats: Formats = None,
    patterns: Patterns = None,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Predict the speed-up of each format over dense on a machine. Nothing is compressed.

    Uses the roofline model, or measured speed-ups (`bench tune`) if the machine has a table with layers like these.

    For few tokens reading the weights takes the time, for many the arithmetic; the table says which.

    Examples: `semisparse plan llama2-7b --gpu h200`; `semisparse plan --shape 4096,4096 --gpu a100 --tokens 1,32`
    """
    from semisparse.api.start import importing

    with importing():
        from semisparse.bench.machines import find_machine
        from semisparse.bench.plan import make_plan
        from semisparse.bench.roofline import candidates
        from semisparse.bench.shapes import layer_shapes

    if (model is None) == (shape is None):
        raise InputError("plan takes a model or --shape N,K, one of the two")
    prediction = make_plan(
        layer_shapes(str(model or shape)),
        positive_integers(tokens, "--tokens"),
        candidates(comma_separated(formats), comma_separated(patterns)),
        dtype_named(dtype),
        find_machine(gpu),
    )
    if as_json:
        print_json(_as_dict(prediction))
    else:
        _show(prediction)


def _as_dict(prediction: Plan) -> dict[str, Any]:
    return {
        "gpu": prediction.machine.name,
        "source": prediction.machine.source,
        "bandwidth": prediction.machine.bandwidth,
        "peaks": dict(prediction.machine.peaks),
        "rows": [row.as_dict() for row in prediction.rows],
        "totals": [
            {"m": m, "candidate": label, "us": seconds * 1e6, "speedup": speedup}
            for (m, label), (seconds, speedup) in prediction.totals().items()
        ],
        "best": [
            {"layer": name, "m": m, "candidate": row.candidate.label} for (name, m), row in prediction.best().items()
        ],
        "left_out": prediction.left_out,
        "sentences": prediction.sentences(),
    }


def _show(prediction: Plan) -> None:
    machine = prediction.machine
    peaks = ", ".join(f"{unit} {peak / 1e12:,.4g}" for unit, peak in machine.peaks.items())
    console.print(f"{machine.name}: reads {machine.bandwidth / 1e12:.3g} TB/s; T(FL)OP/s: {peaks}")
    console.print(f"[dim]Figures from: {machine.source}.[/]")
    if len({row.layer for row in prediction.rows}) == 1:
        _show_layer(prediction)
    else:
        _show_model(prediction)
        _show_best(prediction)
        _show_strategies(prediction)
    for label, reason in prediction.left_out.items():
        console.print(f"[dim]Left out: {label}: {reason}[/]")
    for sentence in prediction.sentences():
        console.print(sentence)
    measured = sorted({row.candidate.label for row in prediction.rows if row.estimate.measured})
    if measured:
        console.print(
            f"[dim]By speed-ups measured on {machine.name}, of the nearest shape that was: {', '.join(measured)}.[/]",
        )
    console.print(
        f"[dim]{'All others' if measured else 'These'} are predictions: `semisparse bench kernels` measures times, "
        "`bench compare` shows the error. They do not cover a model's quality.[/]"
    )


def _show_layer(prediction: Plan) -> None:
    layer = prediction.rows[0].layer
    with_strategy = any(row.estimate.strategy for row in prediction.rows)
    rows = [
        [
            row.candidate.label,
            f"{row.m:,}",
            f"{row.bits_per_weight:.2f}",
            f"{row.estimate.bytes / 1e6:,.2f}",
            f"{row.estimate.operations / row.estimate.bytes:,.3g}",
            f"{row.estimate.seconds * 1e6:,.1f}",
            f"{row.speedup:.2f}",
            row.estimate.bound,
            *([row.estimate.strategy] if with_strategy else []),
        ]
        for row in prediction.rows
    ]
    columns = ["format", "M", "bits", "MB", "FLOP/byte", "us", "speed-up", "bound by"]
    columns += ["strategy"] if with_strategy else []
    print_table(f"N, K = {layer.n:,}, {layer.k:,}", columns, rows)


def _show_model(prediction: Plan) -> None:
    rows = []
    for (m, label), (seconds, speedup) in prediction.totals().items():
        of_candidate = [row for row in prediction.rows if row.m == m and row.candidate.label == label]
        weights = sum(row.layer.count * row.layer.n * row.layer.k for row in of_candidate)
        bits = sum(row.layer.count * row.layer.n * row.layer.k * row.bits_per_weight for row in of_candidate)
        rows.append(
            [label, f"{m:,}", f"{bits / weights:.2f}", bytes_text(bits / 8), f"{seconds * 1e6:,.1f}", f"{speedup:.2f}"]
        )
    columns = ["format", "M", "bits/weight", "weights", "us", "speed-up"]
    print_table("All linear layers without the head", columns, rows)


def _show_strategies(prediction: Plan) -> None:
    rows = [
        [row.layer.title, f"{row.layer.n:,}, {row.layer.k:,}", f"{row.m:,}", row.candidate.label, row.estimate.strategy]
        for row in prediction.rows
        if row.estimate.strategy
    ]
    if rows:
        print_table("Strategy per layer", ["layer", "N, K", "M", "format", "strategy"], rows)


def _show_best(prediction: Plan) -> None:
    rows = [
        [row.layer.title, f"{row.layer.n:,}, {row.layer.k:,}", f"{row.m:,}", row.candidate.label, f"{row.speedup:.2f}"]
        for row in prediction.best().values()
    ]
    print_table("Fastest per layer", ["layer", "N, K", "M", "fastest", "speed-up"], rows)

"""``semisparse bench model``: time prefill and decode of a whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisparse.cli.arguments import (
    Device,
    Dtype,
    Json,
    NewTokens,
    OutCsv,
    comma_separated,
    dtype_named,
    key_values,
    positive_integers,
)
from semisparse.cli.output import print_json, print_table
from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.bench.model import ModelSpeed


def model(
    checkpoint: Annotated[Path | None, typer.Argument(help="A model directory, dense or compressed.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="The dense model's directory, measured beside it.")] = None,
    arch: Annotated[
        str | None, typer.Option(help="Architectures with random weights, comma-separated, instead of a directory.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="With --arch: formats, comma-separated, beside transformers' dense layers.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="With --arch: the formats' pattern; that of their recipes by default.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="With --arch: a pack option of the formats, such as kind=int8; repeat it for several."
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Sequences per batch, comma-separated.")] = "1",
    prompt: Annotated[str, typer.Option("--prompt", help="Tokens per prompt, comma-separated.")] = "512",
    new: NewTokens = 128,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: OutCsv = None,
    as_json: Json = False,
) -> None:
    """Time prefill and decode of a whole model, dense beside compressed, as `semisparse generate` runs it.

    Examples: `semisparse bench model small --baseline MODEL`; `semisparse bench model --arch llama2-7b --format gqs`;
    `semisparse bench model --arch qwen2.5-7b --format dense,slide24 --set kind=int8 --prompt 512,2048`
    """
    from semisparse.api.start import importing

    if (checkpoint is None) == (arch is None):
        raise InputError("bench model takes a model directory or --arch NAME, one of the two")
    if checkpoint is not None and (settings or pattern or format):
        raise InputError("--format, --pattern and --set go with --arch: a model directory is timed as it is stored")
    with importing(checkpoint, device):
        from semisparse.api import pick_device
        from semisparse.bench.model import Workload, measure_each, measure_in_engine, measure_model, random_model
        from semisparse.bench.roofline import candidate_named
        from semisparse.engine import Engine

    target = pick_device(device)
    workloads = [
        Workload(count, length, new)
        for count in positive_integers(batch, "--batch")
        for length in positive_integers(prompt, "--prompt")
    ]
    if checkpoint is not None:
        paths = {"dense": baseline, "as stored": checkpoint}
        speeds: Iterable[ModelSpeed] = (
            measure_model(engine, path.name, label, workload)
            for label, path in paths.items()
            if path
            for engine in [Engine(path, device=target.type)]
            for workload in workloads
        )
    else:
        options = key_values(settings or (), "--set")
        compared = [None, *(candidate_named(form, pattern, options) for form in comma_separated(format) or [])]
        speeds = (
            speed
            for name in comma_separated(arch) or []
            for speed in measure_each(
                partial(random_model, name, dtype_named(dtype), target), name, compared, workloads, measure_in_engine
            )
        )
    report(write_rows(speeds, out), as_json)


def write_rows(speeds: Iterable[ModelSpeed], out: Path | None) -> list[ModelSpeed]:
    """Collect measurements, writing the CSV file after each, so that an interrupted run keeps its rows.

    Args:
        speeds: measures as it is iterated over.
        out: the CSV file; None for no file.
    """
    from semisparse.bench.table import write_csv

    rows: list[ModelSpeed] = []
    for speed in speeds:
        rows.append(speed)
        if out is not None:
            write_csv(out, rows)
    return rows


def report(rows: list[ModelSpeed], as_json: bool) -> None:
    """Print measurements as JSON or as a table."""
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    columns = ["model", "weights", "batch", "prompt", "first token, ms", "step, ms", "tokens/s", "GB", "peak"]
    cells = [
        [
            row.model,
            row.weights,
            str(row.batch),
            str(row.prompt),
            f"{row.first_token_ms:,.1f}",
            f"{row.decode_ms:,.2f}",
            f"{row.decode_tokens_per_second:,.1f}",
            f"{row.weight_gb:,.2f}",
            f"{row.peak_gb:,.2f}",
        ]
        for row in rows
    ]
    print_table(f"{rows[0].machine}, {rows[0].software}", columns, cells)

"""``semisparse bench tune``: the table by which matmuls choose a kernel, measured on this GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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
from semisparse.cli.output import print_json, print_table, progress_bar


def tune(
    shapes: Shapes = "llama2-7b:fused",
    tokens: TokenCounts = "1,8,16,32,64,128,256,1024",
    formats: Formats = None,
    patterns: Patterns = None,
    quant: Annotated[str | None, typer.Option(help="Variants of formats (w4, ...), comma-separated; else all.")] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(callback=writable_file, help="The table; by default the user's, which matmuls use."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what the table has for all of --tokens: an earlier run's rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time every kernel and write a table, by which matmuls of these shapes choose the fastest from then on.

    The table is written after each shape and variant, so that an interrupted run can go on with --resume.
    """
    from semisparse.api import pick_device
    from semisparse.bench.kernels import Setup
    from semisparse.bench.machines import find_machine
    from semisparse.bench.roofline import candidates
    from semisparse.bench.shapes import layer_shapes
    from semisparse.bench.tune import add_to_table, compiling_processes, of_kinds, unmeasured, users_table
    from semisparse.bench.tune import tune as tune_shapes

    target = pick_device(device)
    table = users_table(target)
    compared = of_kinds(candidates(comma_separated(formats), comma_separated(patterns)), comma_separated(quant))
    layers = {(layer.n, layer.k): layer for name in shape_names(shapes) for layer in layer_shapes(name)}
    counts = positive_integers(tokens, "--tokens")
    setup = Setup("", dtype_named(dtype), target, find_machine(target.type))
    path = out or table
    rows = []
    with compiling_processes() as pool, progress_bar(not as_json) as bars:
        task = bars.add_task("shapes", total=len(layers))
        for layer in layers.values():
            left = unmeasured(compared, layer, setup.dtype, counts, path) if resume else compared
            for measured in tune_shapes(setup, [layer], left, counts, pool) if left else ():
                add_to_table(path, measured)
                rows += measured
            bars.advance(task)
    if as_json:
        print_json({"table": str(path), "rows": [asdict(row) for row in rows]})
        return
    columns = ["format", "pattern", "variant", "N, K", "M", "kernel", "us", "dense us"]
    print_table(
        f"{len(rows)} rows, in {path}",
        columns,
        [
            [r.format, r.pattern, r.variant, f"{r.n}, {r.k}", str(r.m), r.kernel, f"{r.us:,.1f}", f"{r.dense_us:,.1f}"]
            for r in rows
        ],
    )

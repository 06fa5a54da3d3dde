"""``semisparse eval``: measure perplexity, KL divergence to a baseline, and lm-eval tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import fill, print_json, print_table, progress_bar


def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A model directory: dense, compressed, or quantised by another tool (dequantised).")
    ],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="The dense model's directory, for the KL divergence to it.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="A .txt file (split into chunks) or a .jsonl file (one document per line)."),
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option("--seqlen", help="Tokens per chunk; by default the model's context, 2048 at most.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="lm-eval tasks or YAML files of tasks, comma-separated (needs semisparse[eval])."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a model's loss on a text, its KL divergence to the dense model, and lm-eval tasks.

    Example: `semisparse eval out --baseline model --text held-out.txt`
    """
    from semisparse.api.start import importing

    with importing(model, "auto"):
        from semisparse.api.measuring import evaluate as measure

    with progress_bar(shown=not as_json) as bars:
        task = bars.add_task("scoring", total=None)
        report = measure(
            model,
            baseline,
            text,
            seqlen=seqlen,
            tasks=tasks.split(",") if tasks else (),
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
        fill(bars, task)
    if as_json:
        print_json(report)
        return
    rows = [
        (name, f"{report[name]:.6g}") for name in ("nll", "perplexity", "kl", "tokens") if report.get(name) is not None
    ]
    for name, metrics in report.get("tasks", {}).items():
        rows += [(f"{name} {metric}", f"{value:.6g}") for metric, value in metrics.items()]
    print_table(str(model), ("", "value"), rows)

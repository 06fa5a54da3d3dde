"""``semisparse eval``: perplexity, KL to a baseline, tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from semisparse.cli.output import print_json, print_table, progress_bar


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model directory, dense or compressed.")],
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="The dense model, for the KL divergence to it.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="A .txt file (joined and cut into chunks) or .jsonl (one document a line)."),
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option("--seqlen", help="Tokens in a chunk; by default the model's context, 2048 at most.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", help="lm-eval tasks or YAML files of tasks, by commas (extra semisparse[eval])."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure a model's loss on a text, and how far it is from the dense one.

    Example: `semisparse eval out --baseline model --text held-out.txt`
    """
    from semisparse import api

    with progress_bar(shown=not json) as bars:
        task = bars.add_task("scoring", total=None)
        found = api.evaluate(
            model,
            baseline,
            text,
            seqlen=seqlen,
            tasks=tasks.split(",") if tasks else (),
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    if json:
        print_json(found)
        return
    rows = [
        (name, f"{found[name]:.6g}") for name in ("nll", "perplexity", "kl", "tokens") if found.get(name) is not None
    ]
    for name, metrics in found.get("tasks", {}).items():
        rows += [(f"{name} {metric}", f"{value:.6g}") for metric, value in metrics.items()]
    print_table(str(model), ("", "value"), rows)

"""``semisparse demo``: compress and run the small model that ships with semisparse."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import bytes_text, console, print_json, print_table, progress_bar
from semisparse.demo import CALIBRATION, HELD_OUT, MODEL

RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("slidesparse", ()),
    ("rheosparse", ("search=none",)),
    ("rheosparse", ("search=none", "prune=magnitude")),
    ("rheosparse", ("search=none", "pattern=60%")),
)
"""Recipes and settings. They leave out the search, which would take as long as all of these."""

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
NEW_TOKENS = 64
SAMPLES = 64


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder for the compressed models; by default they are deleted.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compress the small model that ships with semisparse by several recipes; show each one's size, quality and speed.

    Example: `semisparse demo`
    """
    from semisparse import api

    with tempfile.TemporaryDirectory() as scratch, progress_bar(shown=not as_json) as bars:
        task = bars.add_task("dense", total=1 + len(RUNS))
        rows = [_measure("dense", MODEL)]
        for recipe, settings in RUNS:
            name = " ".join((recipe, *settings))
            bars.update(task, advance=1, description=name)
            target = (out or Path(scratch)) / name.replace(" ", "-").replace("%", "pct").replace(":", "of")
            api.compress(MODEL, recipe=recipe, calibration=CALIBRATION, out=target, settings=settings, samples=SAMPLES)
            rows.append(_measure(name, target))
        bars.update(task, advance=1, description="done")
    if as_json:
        print_json({"models": rows})
        return
    _show(rows)


def _measure(name: str, model: Path) -> dict[str, Any]:
    from semisparse import api
    from semisparse.engine import Engine

    description = api.inspect_directory(model)
    quality = api.evaluate(model, MODEL, HELD_OUT)
    (generation,) = Engine(model).generate([PROMPT], NEW_TOKENS)
    return {
        "recipe": name,
        "bytes": description["bytes"],
        "bits_per_weight": description["bits_per_weight"] or description["layers"][0]["bits_per_weight"],
        "perplexity": quality["perplexity"],
        "kl": quality["kl"],
        "tokens_per_second": generation.tokens_per_second,
        "text": generation.text,
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "The demo model, dense and compressed (perplexity and KL to dense on held-out text)",
        ("recipe", "model size", "bits/weight", "perplexity", "KL to dense", "tokens/s"),
        [
            (
                row["recipe"],
                bytes_text(row["bytes"]),
                f"{row['bits_per_weight']:.2f}",
                f"{row['perplexity']:.2f}",
                f"{row['kl']:.4f}",
                f"{row['tokens_per_second']:.0f}",
            )
            for row in rows
        ],
    )
    console.print(
        "A decode step of a model this small is bound by the host's work per layer, not by reading weights. Expect "
        "speed-ups from sparsity on models whose layers exceed the cache (`semisparse plan` predicts them).",
        highlight=False,
    )
    for row in (rows[0], rows[2]):
        console.rule(f"{row['recipe']}, continuing {PROMPT!r}", align="left")
        console.print(row["text"], markup=False, highlight=False)

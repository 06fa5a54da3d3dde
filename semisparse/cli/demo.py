"""``semisparse demo``: the main job on the model that ships with the project."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from semisparse.cli.output import bytes_text, console, print_json, print_table, progress_bar
from semisparse.demo import CALIBRATION, HELD_OUT, MODEL

RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("slidesparse", ()),
    ("rheosparse", ("search=none",)),
    ("rheosparse", ("search=none", "prune=magnitude")),
    ("rheosparse", ("search=none", "pattern=60%")),
)
"""Recipes and what is varied in them; a search would take as long as all of these."""

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
NEW_TOKENS = 64
SAMPLES = 64


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep the compressed models there; by default nothing is kept.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compress the small model that ships with the project by several recipes, and show what each costs and brings.

    Example: `semisparse demo`
    """
    from semisparse import api

    with tempfile.TemporaryDirectory() as scratch, progress_bar(shown=not json) as bars:
        task = bars.add_task("dense", total=1 + len(RUNS))
        rows = [_measure("dense", MODEL)]
        for recipe, settings in RUNS:
            name = " ".join((recipe, *settings))
            bars.update(task, advance=1, description=name)
            place = (out or Path(scratch)) / name.replace(" ", "-").replace("%", "pct").replace(":", "of")
            api.compress(MODEL, recipe=recipe, calibration=CALIBRATION, out=place, settings=settings, samples=SAMPLES)
            rows.append(_measure(name, place))
        bars.update(task, advance=1, description="done")
    if json:
        print_json({"models": rows})
        return
    _show(rows)


def _measure(name: str, model: Path) -> dict[str, Any]:
    from semisparse import api
    from semisparse.engine import Engine

    found = api.inspect_directory(model)
    quality = api.evaluate(model, MODEL, HELD_OUT)
    (text,) = Engine(model).generate([PROMPT], NEW_TOKENS)
    return {
        "recipe": name,
        "bytes": found["bytes"],
        "bits_per_weight": found["bits_per_weight"] or found["layers"][0]["bits_per_weight"],
        "perplexity": quality["perplexity"],
        "kl": quality["kl"],
        "tokens_per_second": text.tokens_per_second,
        "text": text.text,
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
        "A model this small spends a token's time on the host's work for each layer, not on reading weights: expect "
        "speed from sparsity on models whose layers do not fit a cache (`semisparse plan` says how much).",
        highlight=False,
    )
    for row in (rows[0], rows[2]):
        console.rule(f"{row['recipe']}, continuing {PROMPT!r}", align="left")
        console.print(row["text"], markup=False, highlight=False)

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
"""(recipe, settings) of each compressed model. None has the search of `rheosparse`, which takes as long as all four."""

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
NEW_TOKENS = 64
"""Tokens to generate per model."""
SAMPLES = 64
"""Calibration samples per compressed model."""
SHOWN = (0, 2)
"""Rows whose generated text is shown: dense, and `rheosparse` at its own pattern."""


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to keep the compressed models in; by default they are deleted.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compress the small model that ships with semisparse with several recipes; show their sizes, quality and speed.

    Example: `semisparse demo`
    """
    from semisparse import api

    with tempfile.TemporaryDirectory() as scratch, progress_bar(shown=not as_json) as bars:
        task = bars.add_task("dense", total=1 + len(RUNS))
        rows = [_measure("dense", MODEL)]
        for recipe, settings in RUNS:
            name = " ".join((recipe, *settings))
            bars.update(task, advance=1, description=name)
            folder = (out or Path(scratch)) / name.replace(" ", "-").replace("%", "pct").replace(":", "of")
            api.compress(MODEL, recipe=recipe, calibration=CALIBRATION, out=folder, settings=settings, samples=SAMPLES)
            rows.append(_measure(name, folder))
        bars.update(task, advance=1, description="done")
    if as_json:
        print_json({"models": rows})
        return
    _show(rows)


def _measure(name: str, model: Path) -> dict[str, Any]:
    """Return a row of the table.

    Its values are the bytes of the model's tensors, bits per weight, perplexity and mean KL(dense || model) in nats per
    token on `HELD_OUT`, and tokens/s of generating `NEW_TOKENS` tokens, the prompt included.
    """
    from semisparse import api
    from semisparse.engine import Engine

    description = api.inspect_directory(model)
    quality = api.evaluate(model, MODEL, HELD_OUT)
    (generation,) = Engine(model).generate([PROMPT], NEW_TOKENS)
    return {
        "recipe": name,
        "bytes": description["bytes"],
        # Of the compressed layers; in the dense model there are none, and all linear layers have the same width.
        "bits_per_weight": description["bits_per_weight"] or description["layers"][0]["bits_per_weight"],
        "perplexity": quality["perplexity"],
        "kl": quality["kl"],
        "tokens_per_second": generation.tokens_per_second,
        "text": generation.text,
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        "The demo model, dense and compressed; perplexity and KL(dense || model), in nats per token, on held-out text",
        ("recipe", "model size", "bits/weight", "perplexity", "KL", "tokens/s"),
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
        "With a model this small the time per token is overhead per layer (Python, kernel launches), not reading "
        "weights. Expect speed-ups from sparsity where layers do not fit the cache of the GPU or CPU "
        "(`semisparse plan` predicts them).",
        highlight=False,
    )
    for row in (rows[index] for index in SHOWN):
        console.rule(f"{row['recipe']}: continuation of {PROMPT!r}", align="left")
        console.print(row["text"], markup=False, highlight=False)

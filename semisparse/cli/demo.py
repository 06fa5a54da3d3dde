"""``semisparse demo``: what compressing the small model that ships with semisparse gains and costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import bytes_text, console, print_json, print_table, progress_bar

SHOWN_LINES = 4
"""Lines of generated text that are shown: after them a model of this size repeats itself."""
FASTER = 1.05
"""Speed-ups below this count as none: times vary by a few percent."""


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to keep the compressed models in; by default they are deleted.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compress the small model that ships with semisparse, and show what that gains and costs.

    Beside two models compressed now there is one whose layers a search has chosen (`--target bits=4.5`). A layer of a
    7B is timed on this CPU, and `plan` predicts what a GPU gains. Takes less than a minute on two cores.

    Example: `semisparse demo`
    """
    from semisparse.api.demo import STEPS, run_demo

    with progress_bar(shown=not as_json) as bars:
        task = bars.add_task("", total=STEPS)
        begun = iter(range(STEPS))
        result = run_demo(out, lambda step: bars.update(task, completed=next(begun), description=step))
        bars.update(task, completed=STEPS, description="done")
    if as_json:
        print_json(result)
        return
    _show_models(result["models"])
    _show_samples(result["models"])
    _show_speed(result["models"], result["layer"], result["plan"])


def _show_models(rows: list[dict[str, Any]]) -> None:
    print_table(
        "The demo model on held-out text (loss and KL to dense in nats per token)",
        ("recipe", "model size", "bits", "loss", "KL", "tokens/s"),
        [
            (
                row["recipe"],
                f"{bytes_text(row['bytes'])} ({row['bytes'] / rows[0]['bytes']:.0%})",
                f"{row['bits_per_weight']:.2f}",
                f"{row['nll']:.3f}",
                f"{row['kl']:.3f}",
                f"{row['tokens_per_second']:.0f}",
            )
            for row in rows
        ],
    )


def _show_samples(rows: list[dict[str, Any]]) -> None:
    """Print the text that the dense model and the chosen one generate."""
    for row in rows[:2]:
        console.rule(f"{row['recipe']}, loss {row['nll']:.3f}", align="left")
        console.print("\n".join(row["text"].splitlines()[:SHOWN_LINES]), markup=False)
    console.rule()


def _show_speed(rows: list[dict[str, Any]], layer: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> None:
    """Say whether the models are faster here, and what a large one gains on this CPU and on a GPU."""
    from semisparse.api.demo import GPU, LARGE, LAYER, RUNS

    dense, fastest = rows[0]["tokens_per_second"], max(row["tokens_per_second"] for row in rows[1:])
    slower = fastest < FASTER * dense
    console.print(
        f"Speed of this model on this machine: {dense:.0f} tokens per second dense, {fastest:.0f} compressed. "
        + (
            "It is smaller, not faster: its layers fit the cache, so a token's time is overhead per layer."
            if slower
            else "It is smaller and faster."
        ),
    )
    print_table(
        f"{LARGE}, one token: a layer of {LAYER} on this CPU, and all linear layers on an {GPU}",
        ("weights", "CPU, ms", "speed-up", f"{GPU}, ms", "speed-up"),
        [
            (
                here["weights"] if recipe == here["weights"] else f"{recipe} ({here['weights']})",
                f"{here['ms']:.2f}",
                f"{here['speedup']:.2f}",
                f"{there['ms']:.2f}",
                f"{there['speedup']:.2f}",
            )
            for recipe, here, there in zip(("dense", *(recipe for recipe, _ in RUNS)), layer, predicted, strict=True)
        ],
    )
    best = max(row["speedup"] for row in layer)
    here = f"measured now, {best:.1f} times as fast as dense at best" if best >= FASTER else "measured now, not faster"
    console.print(
        f"The CPU's column is {here} (other processes on this machine disturb it); the GPU's is what `semisparse plan "
        f"{LARGE} --gpu {GPU}` predicts.",
    )

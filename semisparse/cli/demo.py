"""``semisparse demo``: what compressing the small model that ships with semisparse gains and costs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semisparse.cli.arguments import Json
from semisparse.cli.output import bytes_text, console, print_json, print_table, progress_bar
from semisparse.demo import CALIBRATION, CHOSEN, HELD_OUT, MODEL

if TYPE_CHECKING:
    from semisparse.engine import Engine

RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dense-w4", ("tune=none",)),
    ("rheosparse", ("search=none",)),
)
"""(recipe, settings) of the models that are compressed now. Tuning and searching would take minutes."""

TARGET = "--target bits=4.5"
"""What `CHOSEN` was compressed with."""

PROMPT = "    def test_close(self):\n        f = open("
NEW_TOKENS = 64
"""Tokens to generate per model."""
REPEATS = 4
"""Generations per model, of which the fastest counts: other processes slow some of them down."""
SHOWN_LINES = 4
"""Lines of generated text that are shown: after them a model of this size repeats itself."""
SAMPLES = 32
"""Calibration samples per compressed model."""

LARGE = "llama2-7b"
LAYER = "4096,4096"
"""N,K of the linear layers in its attention, one of which is timed here."""
STORED = {"gqs": ("g128@0%", {"kind": "w4"}), "bitmask": ("32:64", {})}
"""Format -> pattern and options with which the large layer is timed: those of `RUNS`."""
GPU = "h200"
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
    from semisparse import api

    with tempfile.TemporaryDirectory() as scratch, progress_bar(shown=not as_json) as bars:
        task = bars.add_task("dense", total=4 + len(RUNS))
        measured = [_measure("dense", MODEL)]
        bars.update(task, advance=1, description=TARGET)
        measured.append(_measure(TARGET, CHOSEN))
        for recipe, settings in RUNS:
            name = " ".join((recipe, *settings))
            bars.update(task, advance=1, description=name)
            folder = (out or Path(scratch)) / name.replace(" ", "-")
            api.compress(MODEL, recipe=recipe, calibration=CALIBRATION, out=folder, settings=settings, samples=SAMPLES)
            measured.append(_measure(name, folder))
        bars.update(task, advance=1, description="generating")
        rows = _generate(measured)
        bars.update(task, advance=1, description=f"a layer of {LARGE}")
        layer = _time_layer()
        bars.update(task, advance=1, description="done")
    predicted = _predict()
    if as_json:
        print_json({"models": rows, "layer": layer, "plan": predicted})
        return
    _show_models(rows)
    _show_samples(rows)
    _show_speed(rows, layer, predicted)


def _measure(name: str, model: Path) -> tuple[dict[str, Any], Engine]:
    """Return a model's size and quality, and an engine that runs it."""
    from semisparse import api
    from semisparse.engine import Engine

    description = api.inspect_directory(model)
    quality = api.evaluate(model, MODEL, HELD_OUT)
    row = {
        "recipe": name,
        "bytes": description["bytes"],
        # The mean of the compressed layers. The dense model has none; there every linear layer has the same bits.
        "bits_per_weight": description["bits_per_weight"] or description["layers"][0]["bits_per_weight"],
        "nll": quality["nll"],
        "kl": quality["kl"],
    }
    return row, Engine(model)


def _generate(measured: list[tuple[dict[str, Any], Engine]]) -> list[dict[str, Any]]:
    """Add each model's speed and text. The models take turns, so that other processes slow all of them down alike."""
    runs = [[engine.generate([PROMPT], NEW_TOKENS)[0] for _, engine in measured] for _ in range(REPEATS)]
    return [
        row | {"tokens_per_second": max(run.tokens_per_second for run in own), "text": own[0].text}
        for (row, _), own in zip(measured, zip(*runs, strict=True), strict=True)
    ]


def _time_layer() -> list[dict[str, Any]]:
    """Time a layer of `LARGE` for one token on this CPU, dense first, in float32 as `generate` computes."""
    import torch

    from semisparse.bench.kernels import Measurement, Setup, fastest_kernels, measure_layer
    from semisparse.bench.machines import find_machine
    from semisparse.bench.roofline import Candidate, candidates
    from semisparse.bench.shapes import layer_shapes

    (shape,) = layer_shapes(LAYER)
    setup = Setup(LARGE, torch.float32, torch.device("cpu"), find_machine("cpu"))
    compared = [*candidates([]), *(Candidate(name, *stored) for name, stored in STORED.items())]
    measured = measure_layer(setup, shape, [1], compared, exclude=("unpack_cpu",))
    rows = fastest_kernels(row for row in measured if isinstance(row, Measurement))
    return [{"weights": row.candidate.label, "ms": row.us / 1e3, "speedup": row.speedup} for row in rows]


def _predict() -> list[dict[str, Any]]:
    """Predict the speed-ups of all linear layers of a 7B on a GPU, for one token."""
    import torch

    from semisparse.bench.machines import find_machine
    from semisparse.bench.plan import make_plan
    from semisparse.bench.roofline import Candidate, candidates
    from semisparse.bench.shapes import layer_shapes

    compared = [*candidates([]), *(Candidate(name, *stored) for name, stored in STORED.items())]
    plan = make_plan(layer_shapes(LARGE), [1], compared, torch.bfloat16, find_machine(GPU))
    return [
        {"weights": label, "ms": seconds * 1e3, "speedup": speedup}
        for (_, label), (seconds, speedup) in plan.totals().items()
    ]


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
    """Print the text that the dense model and `CHOSEN` generate."""
    for row in rows[:2]:
        console.rule(f"{row['recipe']}, loss {row['nll']:.3f}", align="left")
        console.print("\n".join(row["text"].splitlines()[:SHOWN_LINES]), markup=False, highlight=False)
    console.rule()


def _show_speed(rows: list[dict[str, Any]], layer: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> None:
    """Say whether the models are faster here, and what a large one gains on this CPU and on a GPU."""
    dense, fastest = rows[0]["tokens_per_second"], max(row["tokens_per_second"] for row in rows[1:])
    slower = fastest < FASTER * dense
    console.print(
        f"Speed of this model on this machine: {dense:.0f} tokens per second dense, {fastest:.0f} compressed. "
        + (
            "It is smaller, not faster: its layers fit the cache, so a token's time is overhead per layer."
            if slower
            else "It is smaller and faster."
        ),
        highlight=False,
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
        highlight=False,
    )

"""What compressing the small model that ships with semisparse gains and costs; `semisparse demo` prints it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from semisparse.api.compression import compress
from semisparse.api.inspecting import inspect_directory
from semisparse.api.measuring import evaluate
from semisparse.bench.kernels import Measurement, Setup, fastest_kernels, measure_layer
from semisparse.bench.machines import find_machine
from semisparse.bench.plan import make_plan
from semisparse.bench.roofline import Candidate, candidates
from semisparse.bench.shapes import layer_shapes
from semisparse.demo import CALIBRATION, CHOSEN, HELD_OUT, MODEL
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
SAMPLES = 32
"""Calibration samples per compressed model."""

LARGE = "llama2-7b"
LAYER = "4096,4096"
"""N,K of the linear layers in its attention, one of which is timed here."""
STORED = {"gqs": ("g128@0%", {"kind": "w4"}), "bitmask": ("32:64", {})}
"""Format -> pattern and options with which the large layer is timed: those of `RUNS`."""
GPU = "h200"

STEPS = 4 + len(RUNS)
"""How often `run_demo` calls ``begin``."""


def run_demo(out: Path | None, begin: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """Compress the model, run each version of it, and time and predict a large layer.

    Args:
        out: folder to keep the compressed models in; None deletes them.
        begin: called with the name of each step before it.
    Returns:
        ``models``: a row per model, the dense one first, then `CHOSEN`, then `RUNS`. ``layer``: a row per format of
        `LARGE`'s layer on this CPU, dense first. ``plan``: the same for all layers of `LARGE` on `GPU`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        begin("dense")
        measured = [_measure("dense", MODEL)]
        begin(TARGET)
        measured.append(_measure(TARGET, CHOSEN))
        for recipe, settings in RUNS:
            name = " ".join((recipe, *settings))
            begin(name)
            folder = (out or Path(scratch)) / name.replace(" ", "-")
            compress(MODEL, recipe=recipe, calibration=CALIBRATION, out=folder, settings=settings, samples=SAMPLES)
            measured.append(_measure(name, folder))
        begin("generating")
        models = _generate(measured)
    begin(f"a layer of {LARGE}")
    return {"models": models, "layer": _time_layer(), "plan": _predict()}


def _measure(name: str, model: Path) -> tuple[dict[str, Any], Engine]:
    """Return a model's size and quality, and an engine that runs it."""
    description = inspect_directory(model)
    quality = evaluate(model, MODEL, HELD_OUT)
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
    (shape,) = layer_shapes(LAYER)
    setup = Setup(LARGE, torch.float32, torch.device("cpu"), find_machine("cpu"))
    compared = [*candidates([]), *(Candidate(name, *stored) for name, stored in STORED.items())]
    measured = measure_layer(setup, shape, [1], compared, exclude=("unpack_cpu",))
    rows = fastest_kernels(row for row in measured if isinstance(row, Measurement))
    return [{"weights": row.candidate.label, "ms": row.us / 1e3, "speedup": row.speedup} for row in rows]


def _predict() -> list[dict[str, Any]]:
    """Predict the speed-ups of all linear layers of a 7B on a GPU, for one token."""
    compared = [*candidates([]), *(Candidate(name, *stored) for name, stored in STORED.items())]
    plan = make_plan(layer_shapes(LARGE), [1], compared, torch.bfloat16, find_machine(GPU))
    return [
        {"weights": label, "ms": seconds * 1e3, "speedup": speedup}
        for (_, label), (seconds, speedup) in plan.totals().items()
    ]

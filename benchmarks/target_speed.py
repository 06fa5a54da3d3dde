"""Predicted and measured speed-ups of targets on a model of llama2-7b's shapes with random weights.

    python benchmarks/target_speed.py losses DATA results/target_losses.csv
    python benchmarks/target_speed.py steps semisparse/bench/steps.csv
    python benchmarks/target_speed.py choose results/target_losses.csv results/target_choices.csv --gpu h200
    python benchmarks/target_speed.py time results/target_choices.csv results/h200/target_speed.csv

`losses` measures the losses of choices in a small trained model. `steps` measures, on the GPU, decode steps or prompts
of models whose layers are all stored alike, from which times in the engine are predicted. `choose` takes the losses
layer for layer at the same relative depth, and predicted times; it needs no GPU. `time` measures the chosen models'
decode steps or prompts in the engine, on the GPU, in turns with the dense model's, since clocks change with what a GPU
has just run. A prompt is measured as a CUDA graph, as the engine runs it, and launched from Python, kernel by kernel;
with ``--busy N`` while N processes compute on the CPU, which delay launches.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch
from models import MODELS, Subject
from rows import read_rows, write_rows
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from semisparse.api.recipe import read_recipe
from semisparse.api.targets import WORKLOADS, beside_layers, limits_of, menu, options_of, parse_targets
from semisparse.bench.machines import find_machine
from semisparse.bench.model import Workload, measure_model
from semisparse.bench.roofline import random_weight
from semisparse.bench.shapes import architecture
from semisparse.bench.step import MeasuredStep
from semisparse.bench.timing import clone
from semisparse.compress import Choice, Option, Recipe, calibration_batches
from semisparse.compress.recipe import read_targets
from semisparse.compress.search.allocate import Unreachable, allocate
from semisparse.compress.search.losses import ChoiceLosses
from semisparse.engine import Engine
from semisparse.engine.backend import DecoderBackend
from semisparse.formats.base import Packed, get_format
from semisparse.nn import replace_linear
from semisparse.patterns import NO_ZEROS, parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = "llama2-7b"
UNITS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The linear layers of a decoder layer that share an input, in call order."""

DTYPE, DEVICE = torch.bfloat16, "cuda"

LOSSES = ("model", "layer", "unit", "format", "pattern", "quant", "kl")
CHOICES = ("target", "layer", "unit", "format", "pattern", "quant", "us", "dense_us")
SPEEDS = ("target", "model", "layers", "tokens", "predicted", "measured", "measured_over_asked")
SPEEDS += ("step_ms", "predicted_step_ms", "dense_step_ms", "predicted_dense_step_ms", "gpu", "busy", "captured")
STORED = ("dense", "gqs g128@0% w4", "gqs g32@0% w4", "gqs g64@0% w2", "gqs g16@50% w4", "bitmask 32:64 w4")
"""What the layers of `steps` are stored as, by default: a format, a pattern and a number of bits."""


def main() -> None:
    """Measure losses, choose, or time what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measures = verbs.add_parser("losses", help="measure what choices lose in a small model")
    measures.add_argument("shared", type=Path, help="a directory with models/ and text/")
    measures.add_argument("csv", type=Path)
    measures.add_argument("--model", default="stories260k", choices=MODELS)
    measures.add_argument("--device", default="cpu")
    measures.add_argument("--samples", type=int, default=16)
    measures.set_defaults(call=losses)
    chooses = verbs.add_parser("choose", help="allocate choices by a small model's losses and predicted times")
    chooses.add_argument("losses", type=Path)
    chooses.add_argument("csv", type=Path)
    chooses.add_argument("--targets", nargs="+", default=["decode=2.5x", "prompt=1.25x"])
    chooses.add_argument("--layers", type=int, default=8, help="decoder layers of the timed model")
    chooses.add_argument("--gpu", default="h200")
    chooses.set_defaults(call=choose)
    measures = verbs.add_parser("steps", help="measure models whose layers are all stored alike")
    measures.add_argument("csv", type=Path)
    measures.add_argument("--layers", type=int, default=8)
    measures.add_argument("--tokens", type=int, default=1)
    measures.add_argument("--stored", default=",".join(STORED))
    measures.set_defaults(call=steps)
    times = verbs.add_parser("time", help="measure the chosen models on this GPU")
    times.add_argument("choices", type=Path)
    times.add_argument("csv", type=Path)
    times.add_argument("--targets", nargs="+", help="of those in the choices, by default all")
    times.add_argument("--busy", type=int, default=0, help="processes that compute on the CPU meanwhile")
    times.add_argument("--rounds", type=int, default=5, help="turns of the dense model and the chosen one")
    times.set_defaults(call=time)
    options = parser.parse_args()
    options.call(options)


def choose(options: argparse.Namespace) -> None:
    """Write a row per target, decoder layer and unit."""
    losses = read_losses(options.losses)
    config, machine = _config(options.layers), find_machine(options.gpu)
    shapes = _unit_shapes()
    weights = options.layers * sum(n * k for unit in shapes for n, k in unit)
    rows: list[dict[str, str]] = []
    for written in options.targets:
        targets = dict(read_targets(parse_targets([written])))
        (workload,) = targets
        beside = beside_layers(config, weights, [workload], DTYPE, machine)
        of_shapes = options_of(choices_for(workload), [workload], DTYPE, machine, beside)
        found = [of_shapes(unit) for unit in shapes]
        depth = [round(i * (len(losses) - 1) / max(1, options.layers - 1)) for i in range(options.layers)]
        units = [(i, j) for i in range(options.layers) for j in range(len(UNITS))]
        loss = [[losses[depth[i]][j].get(option.choice, 1e3) for option in found[j]] for i, j in units]
        costs = [[option.costs for option in found[j]] for _, j in units]
        share = limits_of(targets, DTYPE)[workload]
        limit = {workload: share * sum(cost[0][workload] for cost in costs)}
        try:
            picks = allocate(loss, costs, limit)
        except Unreachable as error:
            best = sum(cost[0][workload] for cost in costs) / error.least[workload]
            print(f"{written}: {error}; the best possible is {workload}={best:.4g}x")
            continue
        for (i, j), pick in zip(units, picks, strict=True):
            rows.append(_choice_row(written, i, j, found[j], pick, workload))
            print(*rows[-1].values())
    write_rows(options.csv, rows, CHOICES)


def _choice_row(
    target: str, layer: int, unit: int, found: Sequence[Option], pick: int, workload: str
) -> dict[str, str]:
    choice, us = found[pick].choice, [f"{1e6 * found[index].costs[workload]:.2f}" for index in (pick, 0)]
    values = (target, layer, "+".join(UNITS[unit]), choice.format, choice.pattern, choice.quant, *us)
    return dict(zip(CHOICES, map(str, values), strict=True))


def choices_for(workload: str) -> list[Choice]:
    """Return what `compress` may choose from for a target that is a speed-up."""
    recipe = read_recipe("auto", targets={workload: 2.0})
    return menu(recipe, rounds_activations=workload == "prompt")


def losses(options: argparse.Namespace) -> None:
    """Write the KL divergence of each choice of each unit of a small model alone."""
    subject = Subject(options.model, argparse.Namespace(**vars(options), chunks=1))
    model = AutoModelForCausalLM.from_pretrained(subject.directory, dtype="auto")
    drawn = {"samples": options.samples, "seqlen": subject.seqlen, "seed": 0}
    batches = calibration_batches(subject.tokenizer, subject.calibration, **drawn)
    every = dict.fromkeys(choice for workload in WORKLOADS for choice in choices_for(workload))
    of_shapes = options_of(list(every), (), model.dtype, None)
    measured = ChoiceLosses(
        model,
        batches,
        Recipe(pattern=NO_ZEROS, search_units="inputs"),
        of_shapes,
        seed=0,
        device=options.device,
        progress=lambda stage, done, total: None,
        journal=None,
    )
    rows = []
    for unit, own in zip(measured.units, measured.single_losses(), strict=True):
        name = "+".join(linear.rpartition(".")[2] for linear in unit.linears)
        for option, kl in zip(unit.options, own, strict=True):
            choice = option.choice
            values = (options.model, unit.decoder_layer, name, choice.format, choice.pattern, choice.quant, kl)
            rows.append(dict(zip(LOSSES, map(str, values), strict=True)))
    write_rows(options.csv, rows, LOSSES)


def read_losses(path: Path) -> list[list[dict[Choice, float]]]:
    """Read what `losses` has written, [layers][units][choice]; choices that were not measured are left out."""
    rows = read_rows(path)
    found: list[list[dict[Choice, float]]] = [
        [{} for _ in UNITS] for _ in range(1 + max(int(row["layer"]) for row in rows))
    ]
    for row in rows:
        if float(row["kl"]) < math.inf:
            unit = UNITS.index(tuple(row["unit"].split("+")))
            choice = Choice(row["pattern"], row["quant"], row["format"])
            found[int(row["layer"])][unit][choice] = float(row["kl"])
    return found


def steps(options: argparse.Namespace) -> None:
    """Append a row per way to store the layers to the CSV."""
    columns, rows = [field.name for field in fields(MeasuredStep)], read_rows(options.csv)
    for stored in options.stored.split(","):
        form, pattern, quant, *_ = [*stored.split(), "", ""]
        row = {"format": form, "pattern": pattern or NO_ZEROS, "quant": quant or "none"}
        every = [
            {**row, "layer": str(layer), "unit": "+".join(unit)} for layer in range(options.layers) for unit in UNITS
        ]
        us = 1e3 * step_ms(Engine(_model(every, options.layers)), options.tokens)
        values = (device_facts(DEVICE).name, SHAPES, options.layers, form, row["pattern"], quant, options.tokens)
        rows.append(dict(zip(columns, map(str, (*values, f"{us:.1f}")), strict=True)))
        write_rows(options.csv, rows, columns)
        print(*rows[-1].values(), flush=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run as many processes that do nothing but compute."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def time(options: argparse.Namespace) -> None:
    """Append a row per target: what was chosen for it beside the dense model, each measured in the engine."""
    chosen, rows = read_rows(options.choices), read_rows(options.csv)
    for target in options.targets or dict.fromkeys(row["target"] for row in chosen):
        own = [row for row in chosen if row["target"] == target]
        tokens, layers = WORKLOADS[target.partition("=")[0]], 1 + max(int(row["layer"]) for row in own)
        engines = [Engine(_model(stored, layers)) for stored in (_dense(own), own)]
        ways = ("yes",) if tokens == 1 else ("yes", "no")
        with busy(options.busy):
            turns = [
                {way: [step_ms(engine, tokens, way == "yes") for engine in engines] for way in ways}
                for _ in range(options.rounds)
            ]
        for way in ways:
            dense, step = (median(column) for column in zip(*(turn[way] for turn in turns), strict=True))
            rows.append(_speed_row(target, own, tokens, dense, step))
            rows[-1] |= {"gpu": device_facts(DEVICE).name, "busy": str(options.busy), "captured": way}
            write_rows(options.csv, rows, SPEEDS)
            print(*rows[-1].values(), flush=True)


def _speed_row(target: str, own: Sequence[dict[str, str]], tokens: int, dense: float, step: float) -> dict[str, str]:
    """Return a target's row, without where it was measured; ``dense`` and ``step`` are ms."""
    predicted, predicted_dense = (sum(float(row[key]) for row in own) / 1e3 for key in ("us", "dense_us"))
    asked, measured = float(target.partition("=")[2].removesuffix("x")), dense / step
    speeds = (predicted_dense / predicted, measured, measured / asked, step, predicted, dense, predicted_dense)
    layers = 1 + max(int(row["layer"]) for row in own)
    values = (target, SHAPES, layers, tokens, *(f"{value:.4f}" for value in speeds))
    return dict(zip(SPEEDS, map(str, values), strict=False))


def _dense(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "format": "dense", "pattern": NO_ZEROS, "quant": "none"} for row in rows]


@lru_cache
def _packed(form: str, pattern: str, quant: str, n: int, k: int) -> Packed:
    weight = random_weight(parse_pattern(pattern), n, k, DTYPE, DEVICE)
    return get_format(form).pack(weight, pattern, **({} if quant == "none" else {"kind": quant}))


def _unit_shapes() -> list[list[tuple[int, int]]]:
    """Return the shapes [N, K] of the linear layers of each unit."""
    config = architecture(SHAPES)
    hidden, inner = config.hidden_size, config.intermediate_size
    return [[(hidden, hidden)] * 3, [(hidden, hidden)], [(inner, hidden)] * 2, [(hidden, inner)]]


def _config(layers: int) -> PreTrainedConfig:
    """Return the model's configuration, with as many decoder layers."""
    config = copy.deepcopy(architecture(SHAPES))
    config.num_hidden_layers = layers
    return config


def step_ms(engine: Engine, tokens: int, captured: bool = True) -> float:
    """Return the milliseconds of a decode step, or of a prompt, captured in a CUDA graph or not, in the engine."""
    if isinstance(engine.backend, DecoderBackend):
        engine.backend.prompts.captures = captured
    if tokens == 1:
        return measure_model(engine, SHAPES, "", Workload(1, 1, 256)).decode_ms
    return measure_model(engine, SHAPES, "", Workload(1, tokens - 2, 2)).first_token_ms  # the context is full


def _model(rows: Sequence[dict[str, str]], layers: int) -> PreTrainedModel:
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(_config(layers), dtype=DTYPE).eval()
    for row in rows:
        if row["format"] == "dense" and row["quant"] == "none":
            continue
        parent = model.model.layers[int(row["layer"])]
        for name, module in list(parent.named_modules()):
            if name.rpartition(".")[2] in row["unit"].split("+"):
                n, k = module.weight.shape
                packed = _packed(row["format"], row["pattern"], row["quant"], n, k)
                replace_linear(model, f"model.layers.{row['layer']}.{name}", clone(packed))
    return model


if __name__ == "__main__":
    main()

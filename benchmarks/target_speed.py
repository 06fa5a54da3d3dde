"""Predicted and measured speed-ups of targets on a model of llama2-7b's shapes with random weights.

    python benchmarks/target_speed.py losses DATA results/target_losses.csv
    python benchmarks/target_speed.py choose results/target_losses.csv results/target_choices.csv --gpu h200
    python benchmarks/target_speed.py time results/target_choices.csv results/target_speed.csv results/target_units.csv

`losses` measures the losses of choices in a small trained model. `choose` takes them layer for layer at the same
relative depth, and the times from `plan`; neither needs a GPU. `time` measures, on the GPU, the linear layers alone in
a CUDA graph, all together and each kind of unit alone, and the whole model in the engine; it writes a row per target
and per kind of unit.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from models import MODELS, Subject
from rows import read_rows, write_rows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.api.recipe import read_recipe
from semisparse.api.targets import WORKLOADS, limits_of, menu, options_of, parse_targets
from semisparse.bench.machines import find_machine
from semisparse.bench.model import Workload, measure_in_engine
from semisparse.bench.roofline import random_weight
from semisparse.bench.shapes import architecture
from semisparse.bench.timing import clone, time_calls
from semisparse.compress import Choice, Option, Recipe, calibration_batches
from semisparse.compress.recipe import read_targets
from semisparse.compress.search.allocate import allocate
from semisparse.compress.search.losses import ChoiceLosses
from semisparse.formats.base import Packed, get_format
from semisparse.nn import SparseLinear, replace_linear
from semisparse.patterns import NO_ZEROS, parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = "llama2-7b"
UNITS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The linear layers of a decoder layer that share an input, in call order."""

DTYPE, DEVICE = torch.bfloat16, "cuda"

LOSSES = ("model", "layer", "unit", "format", "pattern", "quant", "kl")
CHOICES = ("target", "layer", "unit", "format", "pattern", "quant", "us", "dense_us")
SPEEDS = ("target", "model", "layers", "tokens", "predicted", "measured", "linear_us", "dense_linear_us")
SPEEDS += ("predicted_us",)
UNIT_TIMES = ("target", "unit", "n", "k", "tokens", "format", "pattern", "quant", "us", "predicted_us", "gpu")
SPEEDS += ("step_ms", "dense_step_ms", "predicted_step_ms", "step_error", "gpu")


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
    chooses.add_argument("--layers", type=int, default=4, help="decoder layers of the timed model")
    chooses.add_argument("--gpu", default="h200")
    chooses.set_defaults(call=choose)
    times = verbs.add_parser("time", help="measure the chosen layers on this GPU")
    times.add_argument("choices", type=Path)
    times.add_argument("csv", type=Path)
    times.add_argument("units", type=Path, help="the CSV for the time of each kind of unit alone")
    times.set_defaults(call=time)
    options = parser.parse_args()
    options.call(options)


def choose(options: argparse.Namespace) -> None:
    """Write a row per target, decoder layer and unit."""
    losses = read_losses(options.losses)
    config, machine = architecture(SHAPES), find_machine(options.gpu)
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = ([(hidden, hidden)] * 3, [(hidden, hidden)], [(inner, hidden)] * 2, [(hidden, inner)])
    rows: list[dict[str, str]] = []
    for written in options.targets:
        targets = dict(read_targets(parse_targets([written])))
        (workload,) = targets
        of_shapes = options_of(choices_for(workload), [workload], DTYPE, machine)
        found = [of_shapes(unit) for unit in shapes]
        depth = [round(i * (len(losses) - 1) / max(1, options.layers - 1)) for i in range(options.layers)]
        units = [(i, j) for i in range(options.layers) for j in range(len(UNITS))]
        loss = [[losses[depth[i]][j].get(option.choice, 1e3) for option in found[j]] for i, j in units]
        costs = [[option.costs for option in found[j]] for _, j in units]
        share = limits_of(targets, DTYPE)[workload]
        limit = {workload: share * sum(cost[0][workload] for cost in costs)}
        for (i, j), pick in zip(units, allocate(loss, costs, limit), strict=True):
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


def time(options: argparse.Namespace) -> None:
    """Measure dense, and what was chosen for each target: the linear layers of all targets first, then whole models."""
    rows, out, units = read_rows(options.choices), dict[str, dict[str, str]](), list[dict[str, str]]()
    targets = {target: [row for row in rows if row["target"] == target] for target in dict.fromkeys(_targets(rows))}
    for target, chosen in targets.items():
        out[target] = linear_times(target, chosen)
        write_rows(options.csv, list(out.values()), SPEEDS)
        print(*out[target].values(), flush=True)
        units += unit_times(target, chosen, WORKLOADS[target.partition("=")[0]])
        write_rows(options.units, units, UNIT_TIMES)
    for target, chosen in targets.items():
        out[target] |= step_times(out[target], chosen)
        write_rows(options.csv, list(out.values()), SPEEDS)
        print(*out[target].values(), flush=True)


def _targets(rows: Sequence[dict[str, str]]) -> list[str]:
    return [row["target"] for row in rows]


def _dense(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "format": "dense", "pattern": NO_ZEROS, "quant": "none", "us": row["dense_us"]} for row in rows]


def linear_times(target: str, chosen: Sequence[dict[str, str]]) -> dict[str, str]:
    """Time all linear layers of a target, without what is between them; `step_ms` and the like stay empty."""
    tokens = WORKLOADS[target.partition("=")[0]]
    layers = 1 + max(int(row["layer"]) for row in chosen)
    dense_us, us = linear_us(_dense(chosen), tokens), linear_us(chosen, tokens)
    predicted, predicted_dense = (sum(float(row[key]) for row in chosen) for key in ("us", "dense_us"))
    times = {"linear_us": us, "dense_linear_us": dense_us, "predicted_us": predicted * dense_us / predicted_dense}
    return {
        **dict.fromkeys(SPEEDS, ""),
        **{"target": target, "model": SHAPES, "layers": str(layers), "tokens": str(tokens)},
        **{"predicted": f"{predicted_dense / predicted:.3f}", "measured": f"{dense_us / us:.3f}"},
        **{name: f"{value:.1f}" for name, value in times.items()},
        "gpu": device_facts(DEVICE).name,
    }


def step_times(linear: dict[str, str], chosen: Sequence[dict[str, str]]) -> dict[str, str]:
    """Time a decode step or a prompt of a target; what is not a linear layer is predicted to take as long as dense."""
    layers, tokens = int(linear["layers"]), int(linear["tokens"])
    dense_step, step = step_ms(_dense(chosen), layers, tokens), step_ms(chosen, layers, tokens)
    predicted = dense_step + (float(linear["predicted_us"]) - float(linear["dense_linear_us"])) / 1e3
    times = {"step_ms": step, "dense_step_ms": dense_step, "predicted_step_ms": predicted}
    return {name: f"{ms:.4f}" for name, ms in times.items()} | {"step_error": f"{step / predicted - 1:.4f}"}


def unit_times(target: str, chosen: Sequence[dict[str, str]], tokens: int) -> list[dict[str, str]]:
    """Time each kind of unit alone, over 16 copies, which do not fit in L2."""
    kinds: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (*_dense(chosen), *chosen):
        kinds[tuple(row[key] for key in ("unit", "format", "pattern", "quant"))] = row
    rows = []
    for kind, row in sorted(kinds.items()):
        n, k = _unit_shape(row["unit"])
        us = linear_us([row] * 16, tokens) / 16
        values = (target, kind[0], n, k, tokens, *kind[1:], f"{us:.2f}", row["us"], device_facts(DEVICE).name)
        rows.append(dict(zip(UNIT_TIMES, map(str, values), strict=True)))
        print(*rows[-1].values(), flush=True)
    return rows


def linear_us(rows: Sequence[dict[str, str]], tokens: int) -> float:
    """Return the microseconds of all linear layers, each unit as one matmul, in one CUDA graph."""
    calls = list[Callable[[], Tensor]]()
    for row in rows:
        n, k = _unit_shape(row["unit"])
        x = torch.randn(tokens, k, dtype=DTYPE, device=DEVICE)
        calls.append(_matmul(row, n, k, x))
    for call in calls:
        call()  # compile
    return time_calls(calls, torch.device(DEVICE)).us * len(calls)


def _matmul(row: dict[str, str], n: int, k: int, x: Tensor) -> Callable[[], Tensor]:
    layer = _layer(row, n, k)
    return lambda: layer(x)


def _layer(row: dict[str, str], n: int, k: int) -> nn.Module:
    if row["format"] == "dense" and row["quant"] == "none":
        layer = nn.Linear(k, n, bias=False, dtype=DTYPE, device=DEVICE)
        return layer.requires_grad_(False)
    return SparseLinear(clone(_packed(row["format"], row["pattern"], row["quant"], n, k)))


@lru_cache
def _packed(form: str, pattern: str, quant: str, n: int, k: int) -> Packed:
    weight = random_weight(parse_pattern(pattern), n, k, DTYPE, DEVICE)
    return get_format(form).pack(weight, pattern, **({} if quant == "none" else {"kind": quant}))


def _unit_shape(unit: str) -> tuple[int, int]:
    config = architecture(SHAPES)
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"q_proj+k_proj+v_proj": 3 * hidden, "o_proj": hidden, "gate_proj+up_proj": 2 * inner, "down_proj": hidden}
    return rows[unit], inner if unit == "down_proj" else hidden


def step_ms(rows: Sequence[dict[str, str]], layers: int, tokens: int) -> float:
    """Return the milliseconds of a decode step, or of a prompt, in the engine."""
    model = _model(rows, layers)
    if tokens == 1:
        return measure_in_engine(model, SHAPES, "", Workload(1, 128, 64)).decode_ms
    return measure_in_engine(model, SHAPES, "", Workload(1, tokens - 2, 2)).first_token_ms  # the context is full


def _model(rows: Sequence[dict[str, str]], layers: int) -> PreTrainedModel:
    config = copy.deepcopy(architecture(SHAPES))
    config.num_hidden_layers = layers
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
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

"""A mixture of 2:4 and dense, both in 8 bits, beside uniform 6:8 and 4:6 of the same predicted prompt time.

    python benchmarks/mixed_sparsity.py DATA results/mixed_sparsity.csv --device cuda

The prompt times are those of llama2-7b's layers on an H200: a layer of the trained model takes the time of the layer of
its role there. No GPU gains on layers as small as the trained model's: those of pycode-11m take 1.7 times as long in 8
bits as dense. All runs are tuned by ``bqpo``, then rounded to int8 with a scale per row; activations are not rounded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from models import MODELS, Subject, parser_of
from rows import add_row, missing, read_rows
from torch import nn
from transformers import AutoModelForCausalLM

from semisparse.api.targets import options_of
from semisparse.bench.machines import find_machine
from semisparse.bench.shapes import architecture
from semisparse.compress import Choice, Option, Recipe, calibration_batches, compress_decoder_layers
from semisparse.compress.search.joint import search_choices
from semisparse.nn import weight_of
from semisparse.patterns import NO_ZEROS
from semisparse.quant.symmetric import DTYPES, fake_quantise_rows

DENSE, DENSE8 = Choice(NO_ZEROS, "none", "dense"), Choice(NO_ZEROS, "int8", "dense")
SPARSE = {pattern: Choice(pattern, "int8", "slide24") for pattern in ("2:4", "4:6", "6:8")}
MENUS = {"2:4 and dense": (DENSE8, SPARSE["2:4"]), "all": (DENSE8, *SPARSE.values())}
"""The choices of each mixture."""

COLUMNS = ("model", "run", "seed", "nll", "kl", "speedup", "share_2:4", "tokens", "samples", "device")


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="pycode-11m")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default=",".join(f"{u}+{m}" for u in ("6:8", "4:6") for m in ("uniform", *MENUS)))
    options = parser.parse_args()
    rows = read_rows(options.csv)
    models, seeds, runs = (words.split(",") for words in (options.models, options.seeds, options.runs))
    for name, keys in groupby(missing(rows, model=models, seed=seeds, run=runs), key=itemgetter(0)):
        subject = Subject(name, options)
        for _, seed, run in keys:
            add_row(options.csv, rows, measure(subject, name, run, int(seed), options))


def measure(subject: Subject, name: str, run: str, seed: int, options: argparse.Namespace) -> dict[str, str]:
    """Compress and evaluate one model: ``6:8+uniform``, or ``6:8+all``, a mixture that is as fast as 6:8."""
    uniform, _, mixture = run.partition("+")
    model = AutoModelForCausalLM.from_pretrained(subject.directory, dtype="auto")
    drawn = {"samples": options.samples, "seqlen": MODELS[name][2], "seed": seed, "device": subject.device.type}
    batches = calibration_batches(subject.tokenizer, subject.calibration, **drawn)
    every = (DENSE, DENSE8, *SPARSE.values())
    of_roles, total = times_of_roles(every)
    share = total(SPARSE[uniform]) / total(DENSE)
    recipe = Recipe(pattern=uniform, tune="bqpo")
    if mixture == "uniform":
        reports = compress_decoder_layers(model, batches, recipe, seed=seed, device=subject.device)
        reached, sparse = share, 0.0
    else:
        menu = {DENSE, *MENUS[mixture]}

        def listed(shapes: Sequence[tuple[int, int]]) -> list[Option]:
            return [option for option in of_roles(shapes) if option.choice in menu]

        # The search's own dense choice costs more than any limit allows everywhere.
        search = Recipe(pattern=NO_ZEROS, search="joint", targets=(("prompt", 1 / share),))
        found = search_choices(model, batches, search, listed, {"prompt": share}, seed=seed, device=subject.device)
        plan = {"patterns": found.patterns, "pruned": found.weights}
        reports = compress_decoder_layers(model, batches, recipe, seed=seed, device=subject.device, **plan)
        reached = found.predicted["prompt"]
        sparse = sum(choice.pattern == "2:4" for choice in found.choices.values()) / len(found.choices)
    for report in reports:
        round_rows(model.get_submodule(report.name))
    quality = subject.measure(model)
    values = (name, run, seed, quality.nll, quality.kl, f"{1 / reached:.3f}", f"{sparse:.2f}", quality.tokens)
    return dict(zip(COLUMNS, map(str, (*values, options.samples, subject.device.type)), strict=True))


@torch.no_grad()
def round_rows(linear: nn.Module) -> None:
    """Round a linear layer's weight to int8, with a scale per row, in place."""
    weight = weight_of(linear)
    weight.copy_(fake_quantise_rows(weight.float(), DTYPES["int8"]))


def times_of_roles(
    choices: Sequence[Choice],
) -> tuple[Callable[[Sequence[tuple[int, int]]], list[Option]], Callable[[Choice], float]]:
    """Return the options of a unit of the trained model, with llama2-7b's times, and a choice's time in all layers.

    A unit is recognised by its shapes: three layers are q, k and v, two are gate and up; of single ones o is square.
    """
    config = architecture("llama2-7b")
    hidden, inner = config.hidden_size, config.intermediate_size
    large = {
        "qkv": [(hidden, hidden)] * 3,
        "o": [(hidden, hidden)],
        "up": [(inner, hidden)] * 2,
        "down": [(hidden, inner)],
    }
    of_shapes = options_of(list(choices), ["prompt"], torch.bfloat16, find_machine("h200"))
    known = {role: {option.choice: option.costs["prompt"] for option in of_shapes(large[role])} for role in large}

    def of_roles(shapes: Sequence[tuple[int, int]]) -> list[Option]:
        role = {3: "qkv", 2: "up"}.get(len(shapes)) or ("o" if shapes[0][0] == shapes[0][1] else "down")
        weights = sum(n * k for n, k in shapes)
        return [Option(choice, {"bits": 8.0 * weights, "prompt": us}) for choice, us in known[role].items()]

    def total(choice: Choice) -> float:
        return sum(times[choice] for times in known.values())

    return of_roles, total


if __name__ == "__main__":
    main()

"""Quality of tuned and quantised trained models, beside 2:4 and other patterns: one CSV row per run, and a table.

    python benchmarks/gqsa.py DATA results/gqsa.csv --seeds 0,1,2 --jobs 4

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again, so that an
interrupted run continues. Models are calibrated on the ``calib`` text and measured on the ``eval`` text, in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from statistics import mean

import torch
from models import Subject, parser_of
from pruners import PLAIN
from rows import add_row, missing, read_rows
from transformers import PreTrainedModel

from semisparse.nn import weight_of
from semisparse.quant.group import scales_of

STAGES = {"one-shot": "none", "+ bqpo": "bqpo", "+ bqpo + e2e": "bqpo+e2e"}

RUNS: dict[str, tuple[str, ...]] = {
    "W2 to nearest": ("gqsa", "pattern=g16@0%", "quant=w2", "prune=magnitude", "tune=none"),
    **{f"W{bits} dense": ("gqsa", "pattern=g16@0%", f"quant=w{bits}", "tune=none") for bits in (8, 4, 2)},
    "sparsegpt 2:4": ("rheosparse", "pattern=2:4", *PLAIN),
    "sparsegpt 2:4 W4": ("rheosparse", "pattern=2:4", *PLAIN),
    **{f"bqpo {pattern}": ("rheosparse", f"pattern={pattern}", "tune=bqpo") for pattern in ("2:4", "4:8", "32:64")},
    **{f"bqpo {pattern} W4": ("rheosparse", f"pattern={pattern}", "tune=bqpo") for pattern in ("2:4", "32:64")},
    **{
        f"{tune} 32:64 in {quant}": ("rheosparse", "pattern=32:64", f"tune={tune}", f"quant={quant}")
        for tune, quant in (("bqpo", "w8"), ("bqpo", "w4"), ("bqpo+e2e", "w4"))
    },
    **{
        f"W4S{percent} {stage}": ("gqsa", f"pattern=g16@{percent}%", f"tune={tune}")
        for percent in (20, 30, 40, 50)
        for stage, tune in STAGES.items()
    },
}
"""Recipe and settings of each run. Runs that end in "W4" round the kept weights to nearest afterwards; runs that end in
"in w4" or "in w8" store codes."""

COLUMNS = ("model", "run", "seed", "nll", "kl", "bits", "tokens", "samples", "epochs", "seconds", "device")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="babyllama-1m,pycode-11m")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes; small models leave a GPU idle")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    seeds, models, runs = (words.split(",") for words in (options.seeds, options.models, options.runs))
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        absent = missing(rows, seed=seeds, model=models, run=runs)
        futures = [pool.submit(measure, model, run, seed, options) for seed, model, run in absent]
        try:
            for finished in as_completed(futures):
                add_row(options.csv, rows, finished.result())
        except BaseException:  # otherwise the exit would wait for all other runs
            pool.shutdown(cancel_futures=True)
            raise
    print(table(rows))


def measure(name: str, run: str, seed: str, options: argparse.Namespace) -> dict[str, str]:
    """Compress and evaluate one model."""
    subject = Subject(name, options)
    recipe, *settings = RUNS[run]
    form = ("format=bitmask",) if recipe != "gqsa" else ()
    settings += ["search=none", f"tune_epochs={options.epochs}", *form]
    model, report = subject.compress(recipe, settings, int(seed))
    bits = mean(layer["bits_per_weight"] for layer in report.layers)
    if run.endswith(" W4"):
        bits = _round_kept(model, [layer["name"] for layer in report.layers])
    quality = subject.measure(model)
    values = (name, run, seed, quality.nll, quality.kl, bits, quality.tokens, options.samples, options.epochs)
    return dict(zip(COLUMNS, map(str, (*values, round(report.seconds), subject.device.type)), strict=True))


def _round_kept(model: PreTrainedModel, names: list[str]) -> float:
    """Round kept weights to 4 bits in groups of 16 along K; return the bits per weight of a format that stores them."""
    for name in names:
        layer = model.get_submodule(name)
        weight = layer.weight
        rounded = scales_of(weight, 4, 16, weight.dtype).rounded(weight).masked_fill(weight == 0, 0)
        dense = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=weight.dtype)
        weight_of(dense).copy_(rounded)
        if layer.bias is not None:
            dense.bias = layer.bias
        model.set_submodule(name, dense)
    return 4 / 2 + 1 + 24 / 16


def table(rows: list[Mapping[str, str]]) -> str:
    """Return loss and KL of every model and run, means over the seeds, as a Markdown table."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| | bits | {' | '.join(models)} |", "|---" * (2 + len(models)) + "|"]
    for run in RUNS:
        cells, bits = [], ""
        for model in models:
            seeds = [row for row in rows if (row["model"], row["run"]) == (model, run)]
            if seeds:
                bits = f"{float(seeds[0]['bits']):.2f}"
                nll, kl = (mean(float(row[key]) for row in seeds) for key in ("nll", "kl"))
                cells.append(f"{nll:.3f} / {kl:.3f} ({len(seeds)})")
            else:
                cells.append("")
        if bits:
            lines.append(f"| {run} | {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

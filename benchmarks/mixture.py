"""Quality of a compressed mixture of experts, and of a dense model of about the same loss: a CSV row per run, a table.

    python scripts/train_mixture.py DATA
    python benchmarks/mixture.py DATA results/mixture.csv --jobs 8

DATA is a directory with ``models/`` and ``text/``; the first command trains the two models and adds them to it. Rows
that the CSV already has are not measured again. Models are calibrated on the ``calib`` text and measured on the
``eval`` text, in float32. `compress` reports how many calibration tokens were routed to each expert. The CSV has the
fewest and the most of each run. ``mixture_experts.csv`` beside it has each expert's number in the run `COUNTED`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from models import Subject, parser_of
from rows import markdown, read_rows, write_rows

from semisparse.nn.dequantise import dequantise_layers

RUNS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "2:4": ("rheosparse", "pattern=2:4", "search=none"),
    "32:64": ("rheosparse", "pattern=32:64", "search=none"),
    "32:64, `search=profile`": ("rheosparse", "pattern=32:64", "search=profile"),
    "W4": ("gqsa", "pattern=g16@0%"),
    "W4S50": ("gqsa", "pattern=g16@50%"),
    "`auto`, bits=3.0": ("auto",),
    "`auto`, bits=4.5": ("auto",),
}
"""Recipe and settings of each run, by its name. The name of an `auto` run ends in its target, in bits per weight."""

TUNES = ("none", "bqpo")

COUNTED = "32:64"
"""The run whose experts' tokens are written one by one: not tuned, with seed 0."""

ROUTED = re.compile(r"(\d+)(?: tokens routed| were routed)")
"""The number of tokens in an expert's outcome."""

COLUMNS = ("model", "run", "tune", "seed", "nll", "kl", "bits", "fewest", "most", "tokens", "samples", "seconds",
           "device")  # fmt: skip
EXPERT_COLUMNS = ("model", "layer", "tokens", "outcome")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="mixture,mixture-dense")
    parser.add_argument("--runs", default=";".join(RUNS), help="separated by semicolons")
    parser.add_argument("--tunes", default=",".join(TUNES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1, help="processes; small models leave a GPU idle")
    options = parser.parse_args()
    rows, of_experts = read_rows(options.csv), options.csv.with_name(f"{options.csv.stem}_experts.csv")
    counts = read_rows(of_experts)
    done = {tuple(row[column] for column in ("model", "run", "tune", "seed")) for row in rows}
    keys = [
        (model, run, tune, seed)
        for seed in options.seeds.split(",")
        for run in options.runs.split(";")
        for tune in (("none",) if run == "dense" else options.tunes.split(","))
        for model in options.models.split(",")
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(measure, *key, options) for key in keys if key not in done]
        try:
            for finished in as_completed(futures):
                row, routed = finished.result()
                rows.append(row)
                counts += routed
                write_rows(options.csv, rows, COLUMNS)
                write_rows(of_experts, counts, EXPERT_COLUMNS)
                print(*row.values(), flush=True)
        except BaseException:  # otherwise the exit would wait for all other runs
            pool.shutdown(cancel_futures=True)
            raise
    print(table(rows))


def measure(
    name: str, run: str, tune: str, seed: str, options: argparse.Namespace
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Compress and evaluate one model; return its row, and those of its experts if they are counted for this run."""
    subject = Subject(name, options)
    subject.dense.config._experts_implementation = "eager"  # as for the compressed model below
    if run == "dense":
        quality = subject.measure(subject.dense)
        values = (name, run, tune, seed, quality.nll, quality.kl, 8 * subject.dtype.itemsize, "", "", quality.tokens)
        return dict(zip(COLUMNS, map(str, (*values, "", "", subject.device.type)), strict=True)), []
    recipe, *settings = RUNS[run]
    target = {"bits": run.rpartition("=")[2]} if recipe == "auto" else None
    model, report = subject.compress(recipe, [*settings, f"tune={tune}"], int(seed), target)
    stored = 8 * subject.dtype.itemsize * report.bytes_after / report.bytes_before
    dequantise_layers(model, subject.dtype)  # the packed numbers, multiplied densely, which is faster for long texts
    model.config._experts_implementation = "eager"
    quality = subject.measure(model)
    routed = counted(report.layers)
    fewest, most = (f(tokens for _, tokens, _ in routed) if routed else "" for f in (min, max))
    values = (name, run, tune, seed, quality.nll, quality.kl, stored, fewest, most, quality.tokens, options.samples,
              round(report.seconds), subject.device.type)  # fmt: skip
    row = dict(zip(COLUMNS, map(str, values), strict=True))
    kept = routed if (run, tune, seed) == (COUNTED, "none", "0") else []
    return row, [dict(zip(EXPERT_COLUMNS, map(str, (name, *expert)), strict=True)) for expert in kept]


def counted(layers: Sequence[Mapping[str, object]]) -> list[tuple[str, int, str]]:
    """Return the name, the calibration tokens and the outcome of every expert's linear layer."""
    found = ((str(layer["name"]), ROUTED.search(str(layer["outcome"])), str(layer["outcome"])) for layer in layers)
    return [(name, int(match[1]), outcome) for name, match, outcome in found if match]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return bits and KL of every run, plain and tuned, for each model, as a Markdown table."""
    cells = {(row["model"], row["run"], row["tune"]): row for row in rows if row["seed"] == "0"}
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = []
    for run in RUNS:
        line = [run]
        for model in models:
            found = [cells.get((model, run, tune)) for tune in TUNES]
            bits = next((f"{float(row['bits']):.2f}" for row in found if row), "")
            line += [bits, *(f"{float(row['kl']):.3f}" if row else "" for row in found)]
        lines.append(line)
    header = [""] + [column for model in models for column in (f"{model}: bits", "KL", "KL, tuned")]
    return markdown(header, lines)


if __name__ == "__main__":
    main()

"""Quality at equal bits: recipe ``auto`` beside uniform recipes, on trained models; a CSV row per run, and a table.

    python benchmarks/joint.py DATA results/joint.csv --models babyllama-1m,stories260k --seeds 0,1,2

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again. Models are
calibrated on the ``calib`` text and measured on the ``eval`` text, in float32. Every run is tuned by ``bqpo``. A run's
name may be followed by changes, such as ``auto 2.5+linears`` or ``W2 g64+range+untuned``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from statistics import mean

from models import Subject, parser_of
from rows import add_row, missing, read_rows

from semisparse.nn.dequantise import dequantise_layers

TARGETS = ("2.5", "3.0", "3.5", "4.5", "6")

UNIFORM: dict[str, tuple[str, ...]] = {
    **{f"W{bits} g{size}": (f"dense-w{bits}", f"pattern=g{size}@0%") for bits in (2, 3, 4) for size in (128, 64, 32)},
    **{f"W4S{percent}": ("gqsa", f"pattern=g16@{percent}%") for percent in range(20, 90, 10)},
    "32:64": ("rheosparse", "pattern=32:64", "search=none"),
    **{f"32:64 W{bits}": ("rheosparse", "pattern=32:64", "search=none", f"quant=w{bits}") for bits in (8, 4)},
    "2:4 W4": ("rheosparse", "pattern=2:4", "search=none", "quant=w4"),
    "2:4": ("slidesparse", "pattern=2:4", "quant=none"),
    **{f"{zeros}%": ("ec-spmv", f"pattern={zeros}%", "search=none") for zeros in (70, 80, 90)},
}
"""Recipe and settings of each uniform run."""

CHANGES = {
    "range": "scales=range",
    "fit": "scales=fit",
    "untuned": "tune=none",
    "e2e": "tune=bqpo+e2e",
    "kl": "tune=bqpo+kl",
    "distil": "tune=bqpo+distil",
    "linears": "search_units=linears",
    "inputs": "search_units=inputs",
    "8k": "search_tokens=8192",
    "submodules": "tune_units=submodules",
    "swaps": "refine=swaps",
    "onepass": "refine=none",
}
"""The settings that may be added to a run."""

COLUMNS = ("model", "run", "seed", "nll", "kl", "bits", "tokens", "samples", "seconds", "device", "build")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="babyllama-1m,stories260k,pycode-11m")
    parser.add_argument("--runs", default=",".join([*(f"auto {bits}" for bits in TARGETS), *UNIFORM]))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--build", default="now", help="a name for the code that is measured, such as a commit")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    seeds, models, runs = (words.split(",") for words in (options.seeds, options.models, options.runs))
    absent = missing(rows, seed=seeds, model=models, run=runs, build=[options.build])
    for (seed, model), keys in groupby(absent, key=itemgetter(0, 1)):
        subject = Subject(model, options)
        for _, _, run, _ in keys:
            add_row(options.csv, rows, measure(subject, model, run, seed))
    print(table(rows))


def measure(subject: Subject, name: str, run: str, seed: str) -> dict[str, str]:
    """Compress and evaluate one model."""
    base, *changes = run.split("+")
    kind, _, bits = base.partition(" ")
    recipe, *settings = ("auto",) if kind == "auto" else UNIFORM[base]
    target = {"bits": bits} if kind == "auto" else None
    settings += ["tune=bqpo", *(CHANGES[change] for change in changes)]
    model, report = subject.compress(recipe, settings, int(seed), target)
    stored = 8 * subject.dtype.itemsize * report.bytes_after / report.bytes_before
    dequantise_layers(model, subject.dtype)  # the packed numbers, multiplied densely, which is faster for long texts
    quality = subject.measure(model)
    values = (name, run, seed, quality.nll, quality.kl, stored, quality.tokens, subject.options.samples)
    more = (round(report.seconds), subject.device.type, subject.options.build)
    return dict(zip(COLUMNS, map(str, (*values, *more)), strict=True))


def table(rows: list[Mapping[str, str]]) -> str:
    """Return the KL of every model and run, means over the seeds, by stored bits, as a Markdown table."""
    lines = ["| model | bits | run | KL | seeds |", "|---|---|---|---|---|"]
    runs: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        runs.setdefault((row["model"], row["run"]), []).append(row)
    for (model, run), seeds in sorted(runs.items(), key=lambda item: (item[0][0], float(item[1][0]["bits"]))):
        bits, kl = (mean(float(row[key]) for row in seeds) for key in ("bits", "kl"))
        lines.append(f"| {model} | {bits:.2f} | {run} | {kl:.4f} | {len(seeds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

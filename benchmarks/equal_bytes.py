"""Sparse and dense low-bit weights at equal bytes, all tuned, on trained models: one CSV row per run, and a table.

    python benchmarks/equal_bytes.py DATA results/equal_bytes.csv --models babyllama-1m,stories260k --seeds 0,1,2

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again. Models are
calibrated on the ``calib`` text and measured on the ``eval`` text, in float32. Every run is tuned by ``bqpo+e2e``, but
those of 16 bits, which have no scales, by ``bqpo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from statistics import mean

from models import Subject, parser_of
from rows import add_row, missing, read_rows

from semisparse.nn.dequantise import dequantise_layers

RUNS: dict[str, tuple[str, ...]] = {
    "W2 g32": ("dense-w2", "pattern=g32@0%"),
    "W4S50 g16": ("gqsa", "pattern=g16@50%"),
    "W3 g128": ("dense-w3", "pattern=g128@0%"),
    "2:4 W4": ("rheosparse", "pattern=2:4", "quant=w4", "search=none"),
    "32:64 W4": ("rheosparse", "pattern=32:64", "quant=w4", "search=none"),
    "W4S40 g16": ("gqsa", "pattern=g16@40%"),
}
"""Recipe and settings of each run, in two classes of bytes: some 2.85 bits per weight, and some 3.3."""

COLUMNS = ("model", "run", "seed", "nll", "kl", "bits", "tokens", "samples", "tune", "seconds", "device")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="babyllama-1m,stories260k")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tune", default="bqpo+e2e")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    seeds, models, runs = (words.split(",") for words in (options.seeds, options.models, options.runs))
    absent = missing(rows, seed=seeds, model=models, run=runs, tune=[options.tune])
    for (seed, model), keys in groupby(absent, key=itemgetter(0, 1)):
        subject = Subject(model, options)
        for _, _, run, tune in keys:
            add_row(options.csv, rows, measure(subject, model, run, seed, tune))
    print(table(rows))


def measure(subject: Subject, name: str, run: str, seed: str, tune: str) -> dict[str, str]:
    """Compress and evaluate one model."""
    recipe, *settings = RUNS[run]
    model, report = subject.compress(recipe, [*settings, f"tune={tune}"], int(seed))
    bits = mean(layer["bits_per_weight"] for layer in report.layers)
    dequantise_layers(model, subject.dtype)  # the packed numbers, multiplied densely, which is faster for long texts
    quality = subject.measure(model)
    values = (name, run, seed, quality.nll, quality.kl, bits, quality.tokens, subject.options.samples, tune)
    return dict(zip(COLUMNS, map(str, (*values, round(report.seconds), subject.device.type)), strict=True))


def table(rows: list[Mapping[str, str]]) -> str:
    """Return the KL of every model and run, means over the seeds, as a Markdown table."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [f"| | tuned by | bits | {' | '.join(models)} |", "|---" * (3 + len(models)) + "|"]
    for run, tune in dict.fromkeys((row["run"], row["tune"]) for row in rows):
        cells, bits = [], ""
        for model in models:
            seeds = [row for row in rows if (row["model"], row["run"], row["tune"]) == (model, run, tune)]
            bits = f"{float(seeds[0]['bits']):.2f}" if seeds else bits
            cells.append(f"{mean(float(row['kl']) for row in seeds):.3f} ({len(seeds)})" if seeds else "")
        lines.append(f"| {run} | {tune} | {bits} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

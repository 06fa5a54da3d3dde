"""Loss and KL of a trained model with 16:32 in vectors of 1 to 32 rows: one CSV row per run, and a table.

    python benchmarks/vector_lengths.py DATA results/vector_lengths.csv --samples 64 --chunks 100

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again, so that an
interrupted run continues. The model is calibrated on the ``calib`` text and measured on the ``eval`` text, in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

LENGTHS = (1, 4, 16, 32)
STAGES = {"sparsegpt": "none", "+ bqpo": "bqpo"}
COLUMNS = (
    *("model", "length", "stage", "nll", "kl", "bits", "tokens", "samples", "epochs", "seed", "seconds", "device"),
    "first_outcome",
)
"""``first_outcome`` is the outcome of the first layer: tuning that does not lower the held-out loss is undone."""


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--model", default="pycode-11m", choices=list(MODELS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {(row["model"], row["length"], row["stage"]) for row in rows}
    for stage in STAGES:
        for length in options.lengths.split(","):
            if (options.model, length, stage) not in done:
                rows.append(measure(length, stage, options))
                write_rows(options.csv, rows, COLUMNS)
                print(*(rows[-1][column] for column in COLUMNS), flush=True)
    print(table(rows, options.model))


def measure(length: str, stage: str, options: argparse.Namespace) -> dict[str, str]:
    """Compress and evaluate the model with one vector length and stage."""
    subject = Subject(options.model, options)
    settings = (f"pattern=16:32v{length}", f"tune={STAGES[stage]}", f"tune_epochs={options.epochs}")
    model, report = subject.compress("nm-spmm", settings, options.seed)
    layers = list(report.layers)
    bits = sum(layer["bits_per_weight"] for layer in layers) / len(layers)
    quality = subject.measure(model)
    values = (options.model, length, stage, quality.nll, quality.kl, bits, quality.tokens)
    run = (options.samples, options.epochs, options.seed, round(report.seconds), subject.device.type)
    return dict(zip(COLUMNS, map(str, (*values, *run, layers[0]["outcome"])), strict=True))


def table(rows: list[dict[str, str]], model: str) -> str:
    """Return loss and KL by vector length and stage as a Markdown table."""
    by_run: Mapping[tuple[str, str], dict[str, str]] = {
        (row["stage"], row["length"]): row for row in rows if row["model"] == model
    }
    lines = [f"| {model}, 16:32 | {' | '.join(f'L = {length}' for length in LENGTHS)} |", "|---" * 5 + "|"]
    for stage in STAGES:
        cells = [
            f"{float(row['nll']):.3f} / {float(row['kl']):.3f}" if (row := by_run.get((stage, str(length)))) else ""
            for length in LENGTHS
        ]
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

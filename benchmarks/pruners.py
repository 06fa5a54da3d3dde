"""Loss and KL of each pruner on trained models, by pattern: one CSV row per run.

    python benchmarks/pruners.py DATA results/pruners.csv

DATA is a directory with ``models/`` and ``text/``. A model, pattern and method that the CSV already has are not
measured again, whatever the seed, samples, chunks and device, so that an interrupted run continues. Models are
calibrated on the ``calib`` text and measured on the ``eval`` text, on all of it unless ``--chunks`` is given, in
float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

from semisparse.evaluate import measure_quality

PATTERNS = ("2:4", "4:8", "6:8", "32:64", "50%")
PLAIN = ("refine=none", "order=columns", "target=local")
"""Settings that turn off the additions of ``sparsegpt + gains``: refining kept weights by conjugate gradients, pruning
the windows with the largest loss first, and targets that correct earlier layers' errors. Without them,
``sparsegpt`` differs from ``sparsegpt-published`` in two ways: masks are chosen anew as weights are updated, and in
patterns n:m with m of 16 and more the columns of a window are pruned in the order of their loss."""
METHODS: dict[str, tuple[str, ...]] = {
    "magnitude": ("prune=magnitude",),
    "wanda": ("prune=wanda",),
    "sparsegpt-published": ("prune=sparsegpt-published",),
    "sparsegpt": ("prune=sparsegpt", *PLAIN),
    "sparsegpt + gains": ("prune=sparsegpt",),
    "sparsegpt + gains, swaps": ("prune=sparsegpt", "refine=swaps"),
}
COLUMNS = ("model", "pattern", "method", "nll", "kl", "dense_nll", "tokens", "samples", "seed", "device")


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {(row["model"], row["pattern"], row["method"]) for row in rows}
    for name in options.models.split(","):
        wanted = [(p, m) for p in options.patterns.split(",") for m in options.methods.split(";")]
        missing = [(pattern, method) for pattern, method in wanted if (name, pattern, method) not in done]
        for row in measure(name, missing, options):
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*(row[column] for column in COLUMNS), flush=True)


def measure(name: str, runs: list[tuple[str, str]], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Compress and evaluate one model, once per pattern and method."""
    if not runs:
        return
    subject = Subject(name, options)
    dense_nll = measure_quality(subject.dense, subject.chunks).nll
    for pattern, method in runs:
        settings = (f"pattern={pattern}", "format=bitmask", "search=none", *METHODS[method])
        model, _ = subject.compress("rheosparse", settings, options.seed)
        quality = subject.measure(model)
        values = (
            name,
            pattern,
            method,
            quality.nll,
            quality.kl,
            dense_nll,
            quality.tokens,
            options.samples or "default",
            options.seed,
        )
        yield dict(zip(COLUMNS, map(str, (*values, subject.device.type)), strict=True))


if __name__ == "__main__":
    main()

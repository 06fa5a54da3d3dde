"""What the shipped recipe `rheosparse` gains over the uniform pattern: one CSV row per run.

    python benchmarks/search_default.py DATA results/search_default.csv

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again. Every setting
but the pattern and the search is the recipe's own. ``cpu_seconds`` is the CPU time of compressing, on one thread
if ``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

METHODS = ("none", "profile", "evolution", "rheosparse")
KEPT = (32, 24, 16)
COLUMNS = ("model", "kept", "search", "seed", "samples", "nll", "kl", "uniform_search_kl", "search_kl", "cpu_seconds")
COLUMNS += ("tokens", "device")
KEY = COLUMNS[:5]


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kept", default=",".join(map(str, KEPT)))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {tuple(row[key] for key in KEY) for row in rows}
    for name in options.models.split(","):
        runs = [
            key
            for seed in options.seeds.split(",")
            for kept in options.kept.split(",")
            for search in options.methods.split(",")
            if (key := (name, kept, search, seed, str(options.samples or "default"))) not in done
        ]
        for row in measure(Subject(name, options), runs) if runs else ():
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*row.values(), flush=True)


def measure(subject: Subject, runs: list[tuple[str, ...]]) -> Iterator[dict[str, str]]:
    """Compress and evaluate one model, once per run."""
    for run in runs:
        _, kept, search, seed, _ = run
        started = time.process_time()
        settings = (f"pattern={kept}:64", f"search={search}")
        model, report = subject.compress("rheosparse", settings, int(seed))
        seconds = time.process_time() - started
        quality, found = subject.measure(model), report.search or {"uniform_kl": "", "kl": ""}
        figures = (quality.nll, quality.kl, found["uniform_kl"], found["kl"], f"{seconds:.0f}")
        values = (*run, *figures, quality.tokens, subject.device.type)
        yield dict(zip(COLUMNS, map(str, values), strict=True))


if __name__ == "__main__":
    main()

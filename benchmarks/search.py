"""Quality gained by the searches over layer densities: one CSV row per run, a table of means, plots of the densities.

    python benchmarks/search.py DATA results/search.csv --plots results/search

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again, so that an
interrupted run continues. All runs prune by SparseGPT, calibrate and search on the ``calib`` text, and are
measured on all of the ``eval`` text. Both searches evaluate the same number of tokens. "Decided once" is
``prune=sparsegpt-published``; in all other runs masks are repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from models import Subject, parser_of
from pruners import PLAIN
from rows import read_rows, write_rows

from semisparse.bench.plot_densities import plot_densities

MODELS = ("babyllama-1m", "pycode-11m")
SETTINGS = ("prune=sparsegpt", *PLAIN, "format=bitmask")
KEPT = {"50": 32, "62.5": 24, "75": 16}
"""Percentage of zeros -> weights kept of 64."""

ONCE = " (decided once)"
METHODS = {
    "uniform n:8": ("pattern={eighths}:8", "search=none"),
    "uniform n:64": ("pattern={kept}:64", "search=none"),
    "rheosparse": ("pattern={kept}:64", "search=rheosparse"),
    "evolution": ("pattern={kept}:64", "search=evolution"),
    "unstructured": ("pattern={zeros}%", "search=none"),
    f"uniform n:64{ONCE}": ("pattern={kept}:64", "search=none"),
    f"evolution{ONCE}": ("pattern={kept}:64", "search=evolution"),
}
COLUMNS = ("model", "zeros", "method", "seed", "nll", "kl", "search_kl", "search_tokens_run", "tokens", "device")
KEY = COLUMNS[:4]


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument(
        "--plots", type=Path, help="the folder for plots of the densities that evolution finds for the first seed"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--zeros", default=",".join(KEPT))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search-tokens", type=int, default=16384)
    parser.add_argument("--search-effort", type=int, default=384)
    parser.add_argument("--search-banks", type=int, default=4)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    done = {tuple(row[key] for key in KEY) for row in rows}
    for name in options.models.split(","):
        missing = [
            (zeros, method, seed)
            for seed in range(options.seeds)
            for zeros in options.zeros.split(",")
            for method in options.methods.split(",")
            if (name, zeros, method, str(seed)) not in done
        ]
        for row in measure(name, missing, options):
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*(row[column] for column in COLUMNS), flush=True)
    print(table(rows))


def measure(name: str, runs: list[tuple[str, str, int]], options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Compress and evaluate one model, once per sparsity, method and seed."""
    if not runs:
        return
    subject = Subject(name, options)
    for zeros, method, seed in runs:
        numbers = {"kept": KEPT[zeros], "eighths": KEPT[zeros] // 8, "zeros": zeros}
        effort = [f"{key}={getattr(options, key)}" for key in ("search_tokens", "search_effort", "search_banks")]
        prune = ("prune=sparsegpt-published",) if method.endswith(ONCE) else ()
        settings = (*SETTINGS, *effort, *prune, *(setting.format(**numbers) for setting in METHODS[method]))
        model, report = subject.compress("rheosparse", settings, seed)
        if options.plots and method == "evolution" and seed == 0:
            densities = {layer["name"]: layer["density"] for layer in report.layers}
            title = f"{name}, {zeros} % zeros: percent kept in each layer"
            plot_densities(densities, options.plots / f"{name}-{zeros}.png", title)
        quality = subject.measure(model)
        search = report.search or {"kl": "", "tokens": ""}
        values = (name, zeros, method, seed, quality.nll, quality.kl, search["kl"], search["tokens"], quality.tokens)
        yield dict(zip(COLUMNS, map(str, (*values, subject.device.type)), strict=True))


def table(rows: list[dict[str, str]]) -> str:
    """Return loss, KL and the change of KL against the uniform pattern, means over the seeds, as Markdown tables."""
    lines = []
    for model in MODELS:
        lines += [f"| {model} | {' | '.join(f'{zeros} %' for zeros in KEPT)} |", "|---" * (1 + len(KEPT)) + "|"]
        for method in METHODS:
            cells = [cell(rows, model, zeros, method) for zeros in KEPT]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def cell(rows: list[dict[str, str]], model: str, zeros: str, method: str) -> str:
    """Return one cell: loss / KL, and for a search the mean change of KL against uniform n:64 with the same seed."""

    def by_seed(name: str) -> dict[str, dict[str, str]]:
        return {row["seed"]: row for row in rows if (row["model"], row["zeros"], row["method"]) == (model, zeros, name)}

    search, once, _ = method.partition(ONCE)
    runs, uniform = by_seed(method), by_seed(f"uniform n:64{once}")
    if not runs:
        return ""
    text = f"{mean(float(row['nll']) for row in runs.values()):.3f} / "
    text += f"{mean(float(row['kl']) for row in runs.values()):.3f}"
    changes = [float(row["kl"]) / float(uniform[seed]["kl"]) - 1 for seed, row in runs.items() if seed in uniform]
    return f"{text} ({100 * mean(changes):+.1f} %)" if changes and search in ("rheosparse", "evolution") else text


if __name__ == "__main__":
    main()

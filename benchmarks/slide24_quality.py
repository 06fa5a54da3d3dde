"""Loss and KL of a trained model in `slide24`, by pattern and quantisation: one CSV row per run, and a table.

    python benchmarks/slide24_quality.py DATA results/slide24_quality.csv --device cuda

DATA is a directory with ``models/`` and ``text/``. Rows that the CSV already has are not measured again, so that an
interrupted run continues. The model is pruned by SparseGPT with the default settings on the ``calib`` text, and
measured on the ``eval`` text; ``--tunes bqpo`` also trains the kept weights, before they are rounded.
"""

from __future__ import annotations

from itertools import product

import torch
from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

from semisparse.evaluate import measure_quality

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
KINDS = ("none", "int8", "fp8")
TUNES = ("none", "bqpo")
COLUMNS = ("model", "pattern", "quant", "tune", "nll", "kl", "dense_nll", "tokens", "samples", "seed", "device")


def main() -> None:
    """Measure the runs that the CSV lacks, then print the table."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("--model", default="pycode-11m", choices=MODELS)
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tunes", default=",".join(TUNES))
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    samples = str(options.samples or "default")
    done = {
        (row["pattern"], row["quant"], row["tune"], row["samples"], row["seed"])
        for row in rows
        if row["model"] == options.model
    }
    subject = Subject(options.model, options)
    dense_nll = measure_quality(subject.dense, subject.chunks).nll
    dtype = torch.float32 if subject.device.type == "cpu" else torch.bfloat16  # the dtype of the kernels there
    choices = (options.patterns, options.kinds, options.tunes, samples, options.seeds)
    for run in product(*(choice.split(",") for choice in choices)):
        if run in done:
            continue
        pattern, kind, tune, _, seed = run
        settings = (f"pattern={pattern}", f"quant={kind}", f"tune={tune}")
        model, _ = subject.compress("slidesparse", settings, int(seed))
        quality = subject.measure(model, dtype)
        values = (options.model, pattern, kind, tune, quality.nll, quality.kl, dense_nll, quality.tokens)
        values += (samples, seed, subject.device.type)
        rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
        write_rows(options.csv, rows, COLUMNS)
        print(*rows[-1].values(), flush=True)
    print(table([row for row in rows if row["model"] == options.model]))


def table(rows: list[dict[str, str]]) -> str:
    """Return loss and KL as a Markdown table: one row per pattern, one column per kind."""
    kinds = list(dict.fromkeys(row["quant"] for row in rows))
    cells = {(r["pattern"], r["quant"]): f"{float(r['nll']):.3f} / {float(r['kl']):.3f}" for r in rows}
    head = f"| {rows[0]['model']} (dense {float(rows[0]['dense_nll']):.3f})"
    lines = [f"{head} | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        lines.append(f"| {pattern} | {' | '.join(cells.get((pattern, kind), '') for kind in kinds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What calibration gains on text of another kind: one CSV row per model, calibration text and method.

    python benchmarks/other_text.py DATA results/other_text.csv

DATA is a directory with ``models/`` and ``text/``. Each model is calibrated on text of the kind that it was trained on
(stories or Python code), on the other kind, and on a mixture of half of each. The compressed models are measured on
held-out text of both kinds. Rows that the CSV already has are not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

from semisparse.evaluate import measure_quality
from semisparse.text import token_chunks

METHODS: dict[str, tuple[str, ...]] = {
    "sparsegpt": ("refine=none", "order=columns", "target=local"),
    "sparsegpt + gains": (),
    "sparsegpt + gains, bqpo": ("tune=bqpo",),
}
"""Method -> settings of recipe `rheosparse` without its search."""

CALIBRATIONS = ("own", "other", "mixed")
COLUMNS = (
    "model",
    "pattern",
    "calibration",
    "method",
    "kl_own",
    "kl_other",
    "tokens_own",
    "tokens_other",
    "samples",
    "seed",
    "device",
)

PIECE = 2000
"""Characters of one document of the mixture: about 500 tokens, a sequence of the models."""


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("--models", default="stories260k,babyllama-1m,pycode-11m")
    parser.add_argument("--pattern", default="32:64")
    parser.add_argument("--calibrations", default=",".join(CALIBRATIONS))
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    for name in options.models.split(","):
        calibrations, methods = options.calibrations.split(","), options.methods.split(";")
        runs = [(calibration, method) for calibration in calibrations for method in methods]
        done = {(row["model"], row["pattern"], row["calibration"], row["method"]) for row in rows}
        missing = [run for run in runs if (name, options.pattern, *run) not in done]
        if not missing:
            continue
        subject = Subject(name, options)
        other = token_chunks(subject.tokenizer, options.shared / "text" / other_kind(name)[1], subject.seqlen)[
            : options.chunks
        ]
        for calibration, method in missing:
            row = measure(subject, other, name, calibration, method, options)
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*row.values(), flush=True)


def measure(
    subject: Subject, other: list[list[int]], name: str, calibration: str, method: str, options: argparse.Namespace
) -> dict[str, str]:
    """Compress a model once, and measure it on both kinds of text."""
    texts = options.shared / "text"
    own, foreign = texts / MODELS[name][0], texts / other_kind(name)[0]
    mixture = options.csv.parent / f"mixed-{name}.jsonl"
    if calibration == "mixed":
        write_mixture(own, foreign, mixture)
    subject.calibration = {"own": own, "other": foreign, "mixed": mixture}[calibration]
    settings = (f"pattern={options.pattern}", "format=bitmask", "search=none", *METHODS[method])
    model, _ = subject.compress("rheosparse", settings, options.seed)
    mixture.unlink(missing_ok=True)
    on_own = subject.measure(model)
    on_other = measure_quality(model, other, subject.dense)
    values = (name, options.pattern, calibration, method, on_own.kl, on_other.kl, on_own.tokens, on_other.tokens)
    conditions = (options.samples or "default", options.seed, subject.device.type)
    return dict(zip(COLUMNS, map(str, (*values, *conditions)), strict=True))


def other_kind(name: str) -> tuple[str, str]:
    """Return the calibration and the evaluation text that a model was not trained on."""
    return next((texts[0], texts[1]) for texts in MODELS.values() if texts[0] != MODELS[name][0])


def write_mixture(first: Path, second: Path, out: Path) -> None:
    """Write documents of `PIECE` characters, from two files in turn, until the shorter file ends."""
    with out.open("w") as file:
        for pair in zip(pieces(first), pieces(second), strict=False):
            file.writelines(json.dumps({"text": text}) + "\n" for text in pair)


def pieces(path: Path) -> list[str]:
    """Cut a text file, or the documents of a .jsonl file one after another, into pieces of `PIECE` characters."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines())
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]


if __name__ == "__main__":
    main()

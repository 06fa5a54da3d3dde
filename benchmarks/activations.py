"""What rounding activations to 8 bits loses beside rounding the weights: a CSV row per run.

    python benchmarks/activations.py DATA results/activations.csv --models babyllama-1m --samples 128 --chunks 200

DATA is a directory with ``models/`` and ``text/``. A model is compressed once for kernels that round x to 8 bits, then
measured twice: with these kernels, and with the same weights in float32, multiplied by unrounded activations. Runs are
tuned by ``bqpo``. Rows that the CSV already has are not measured again.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from models import Subject, parser_of
from rows import add_row, missing, read_rows

from semisparse.nn.dequantise import dequantise_layers

RUNS: dict[str, tuple[str, ...]] = {
    "W4A8": ("dense-w4", "quant=w4a8"),
    "W4A8S50": ("gqsa", "quant=w4a8"),
    "2:4 int8": ("slidesparse", "pattern=2:4", "quant=int8"),
    "6:8 int8": ("slidesparse", "pattern=6:8", "quant=int8"),
    "2:4 fp8": ("slidesparse", "pattern=2:4", "quant=fp8"),
    "6:8 fp8": ("slidesparse", "pattern=6:8", "quant=fp8"),
}
"""Recipe and settings of each run."""

COLUMNS = ("model", "run", "seed", "kl", "kl_rounded", "nll", "nll_rounded", "tokens", "samples", "device")


def main() -> None:
    """Measure the runs that the CSV lacks."""
    parser = parser_of(__doc__, samples=128)
    parser.add_argument("--models", default="stories260k,babyllama-1m")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    rows = read_rows(options.csv)
    models, seeds, runs = (words.split(",") for words in (options.models, options.seeds, options.runs))
    for (name, seed), keys in groupby(missing(rows, model=models, seed=seeds, run=runs), key=itemgetter(0, 1)):
        subject = Subject(name, options)
        for _, _, run in keys:
            add_row(options.csv, rows, measure(subject, name, run, seed))


def measure(subject: Subject, name: str, run: str, seed: str) -> dict[str, str]:
    """Compress a model, and measure it with and without rounding of activations."""
    recipe, *settings = RUNS[run]
    model, _ = subject.compress(recipe, [*settings, "tune=bqpo"], int(seed))
    rounded = subject.measure(model)
    dequantise_layers(model, subject.dtype)
    exact = subject.measure(model)
    values = (name, run, seed, exact.kl, rounded.kl, exact.nll, rounded.nll, exact.tokens, subject.options.samples)
    return dict(zip(COLUMNS, map(str, (*values, subject.device.type)), strict=True))


if __name__ == "__main__":
    main()

"""Compare models compressed by one rank and by several, on a CPU or a GPU each: masks, KL and bytes.

Usage: python benchmarks/ranks.py DATA OUT.csv --scratch DIR [--models babyllama-1m,pycode-11m] [--ranks 1,2]
           [--samples 16] [--chunks 64] [--device cpu] [--at-once 4]

`masks` is the share of the weights, in percent, that are zero in this model or in that of the first number of ranks
only; `same_bytes` compares with that model, too. `kl` is to the dense model, on held-out text, in nats per token.
`--at-once` models are compressed side by side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from models import Subject, parser_of
from rows import read_rows, write_rows

from semisparse.api import load
from semisparse.nn import SparseLinear

COLUMNS = ("model", "pattern", "samples", "ranks", "masks", "kl", "same_bytes")
PATTERNS = ("32:64", "2:4")
FILES = ("model.safetensors", "config.json")


def compress(subject: Subject, pattern: str, ranks: int, out: Path) -> None:
    """Compress with SparseGPT, without a search, in as many processes of one thread, with a GPU each on GPUs."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    arguments = [
        str(subject.directory),
        "--recipe",
        "rheosparse",
        "--set",
        "search=none",
        "--set",
        f"pattern={pattern}",
    ]
    arguments += ["--calib", str(subject.calibration), "--samples", str(subject.options.samples), "--device"]
    arguments += [subject.device.type]
    arguments += ["--seqlen", str(subject.seqlen), "--out", str(out)]
    command = [sys.executable, *launch, "-m", "semisparse.cli", "compress", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of all compressed layers, [N, K] each, by name."""
    layers = load(directory, "cpu").named_modules()
    return {name: layer.weight for name, layer in layers if isinstance(layer, SparseLinear)}


def differing(one: Path, other: Path) -> float:
    """Return the share of the weights, in percent, that are zero in one model only."""
    others = weights(other)
    pairs = [(weight, others[name]) for name, weight in weights(one).items()]
    count = sum(int(((left == 0) != (right == 0)).sum()) for left, right in pairs)
    return 100 * count / sum(left.numel() for left, _ in pairs)


def main() -> None:
    """Append a row per model, pattern and number of ranks to the CSV."""
    parser = parser_of(__doc__, 16)
    parser.add_argument("--models", default="babyllama-1m,pycode-11m")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    counts = [int(ranks) for ranks in options.ranks.split(",")]
    subjects = {name: Subject(name, options) for name in options.models.split(",")}
    outs: dict[tuple[str, str, int], Path] = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        running = []
        for name, pattern, ranks in product(subjects, PATTERNS, counts):
            out = outs[name, pattern, ranks] = options.scratch / f"{name}-{pattern.replace(':', 'of')}-{ranks}"
            shutil.rmtree(out, ignore_errors=True)
            running.append(pool.submit(compress, subjects[name], pattern, ranks, out))
        for (name, pattern, ranks), out, compressed in zip(outs, outs.values(), running, strict=True):
            compressed.result()
            first = outs[name, pattern, counts[0]]
            same = all((out / file).read_bytes() == (first / file).read_bytes() for file in FILES)
            kl = subjects[name].measure(load(out, options.device, torch.float32)).kl
            values = (name, pattern, options.samples, ranks, f"{differing(first, out):.4f}", f"{kl:.5f}", same)
            rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
            write_rows(options.csv, rows, COLUMNS)
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()

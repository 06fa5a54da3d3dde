"""Milliseconds in which a weight of ec_csr changes its layout on a GPU: by kernels, and by torch alone.

    python benchmarks/ec_csr_loading.py results/h200/ec_csr-loading.csv

Needs a Hopper GPU. The weight, 70 % zeros in float16, is on the GPU in the layout on disk. "arrange" makes what it has
on a GPU, "on disk" goes back, as joining layers does, "validate" is the check of an untrusted file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from rows import write_rows
from turns import turn

from semisparse.bench.roofline import random_weight
from semisparse.formats import Packed, get_format
from semisparse.formats.ec_csr.cuda import pack_panels, pack_tiles, unpack
from semisparse.formats.ec_csr.storage import panels
from semisparse.patterns import parse_pattern

SHAPES = ((4096, 4096), (11008, 4096), (22016, 4096), (4096, 11008))
COLUMNS = ("n", "k", "step", "way", "ms", "machine")
PATTERN = "70%"
REPEATS = 3


def milliseconds(call: Callable[[], object]) -> float:
    """Return the least of `REPEATS` times, after a first call that compiles."""
    call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure(packed: Packed, way: str) -> list[dict[str, str]]:
    """Time the steps of one weight."""
    form = get_format("ec_csr")
    arranged = form.arrange(packed, "cuda")
    steps: dict[str, Callable[[], object]] = {
        "arrange": lambda: form.arrange(packed, "cuda"),
        "on disk": lambda: form.arrange(arranged, "cpu"),
        "validate": lambda: form.validate(packed),
        "validate arranged": lambda: form.validate(arranged),
    }
    (n, k), machine = packed.shape, torch.cuda.get_device_name()
    rows = []
    for step, call in steps.items():
        row = {"n": n, "k": k, "step": step, "way": way, "ms": f"{milliseconds(call):.2f}", "machine": machine}
        rows.append({column: str(value) for column, value in row.items()})
        print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    """Measure, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--turn", type=Path, help="folder of turns.py")
    options = parser.parse_args()
    pattern = parse_pattern(PATTERN)
    weights = []
    for n, k in SHAPES:
        dense = random_weight(pattern, n, k, torch.float16, "cuda")
        weights.append(get_format("ec_csr").pack(dense, pattern))
        get_format("ec_csr").arrange(weights[-1], "cuda")  # compiles
    rows: list[dict[str, str]] = []
    with turn(options.turn):
        for packed in weights:
            rows += measure(packed, "kernels")
            write_rows(options.csv, rows, COLUMNS)
        by_torch = [
            patch.object(module, "refusal", lambda *given: "not now") for module in (pack_panels, pack_tiles, unpack)
        ]
        for change in (*by_torch, patch.object(panels, "GPU_BATCH", panels.BATCH)):
            change.start()
        for packed in weights[:3]:
            rows += measure(packed, "torch")
            write_rows(options.csv, rows, COLUMNS)


if __name__ == "__main__":
    main()

"""Times of slide24 layers beside dense layers in the same precision.

Usage: python benchmarks/slide24.py OUT.csv [--model qwen2.5-7b:fused] [--tokens 64,1024,4096,8192]
       [--patterns 2:4,4:6,6:8,8:10] [--kinds int8,fp8,bf16] [--seconds 0.05]
       python benchmarks/slide24.py OUT.csv --square 1024,2048,4096,8192,16384

Model mode measures the linear layers of a model, at each number of tokens M up to 65,536. Square mode has M = N = K.

The CSV has the rows of `semisparse bench kernels`, all from one process; `semisparse bench plot OUT.csv` draws them.
The program prints the sums over the layers, their speed-up over dense, and the paper's efficiency (equation 19): the
speed-up over dense divided by S(2:4) / gamma, the speed-up of 2:4 after the expansion of K by gamma.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from semisparse.bench import timing
from semisparse.bench.kernels import Measurement, Setup, measure_layer
from semisparse.bench.machines import find_machine
from semisparse.bench.roofline import BASELINE, NO_ZEROS, Candidate
from semisparse.bench.shapes import LayerShape, layer_shapes
from semisparse.bench.table import write_csv

DENSE = {"bf16": {}, "int8": {"kind": "int8"}, "fp8": {"kind": "fp8"}}

EXCLUDED = ("int_mm",)
"""Kernels that are not measured, because another kernel of the same format is always faster."""

Sums = dict[tuple[int, str], float]


def main() -> None:
    """Measure, write the CSV and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen2.5-7b:fused")
    parser.add_argument("--tokens", default="64,1024,4096,8192")
    parser.add_argument("--square", help="M = N = K, comma-separated, instead of a model and its tokens")
    parser.add_argument("--patterns", default="2:4,4:6,6:8,8:10")
    parser.add_argument("--kinds", default="int8,fp8,bf16")
    parser.add_argument("--gpu", default="cuda", help="the machine whose rates give the floors, by its name in `plan`")
    parser.add_argument("--seconds", type=float, default=timing.GPU_SECONDS, help="duration of each measurement")
    options = parser.parse_args()
    timing.GPU_SECONDS = options.seconds
    patterns, kinds = options.patterns.split(","), {kind: DENSE[kind] for kind in options.kinds.split(",")}
    candidates = [Candidate(BASELINE, NO_ZEROS, variant) for variant in DENSE.values()]
    candidates += [Candidate("slide24", pattern, variant) for variant in kinds.values() for pattern in patterns]
    device = torch.device("cuda")
    name = "square" if options.square else options.model
    setup = Setup(name, torch.bfloat16, device, find_machine(options.gpu))
    measurements: list[Measurement] = []
    for layer, tokens in work(options):
        for result in measure_layer(setup, layer, tokens, candidates, EXCLUDED):
            if isinstance(result, Measurement):
                measurements.append(result)
        write_csv(options.out, measurements)  # after each layer, so that an interrupted run keeps its rows
    show(measurements)


def work(options: argparse.Namespace) -> list[tuple[LayerShape, list[int]]]:
    """List the layers to measure, each with its numbers of tokens."""
    if options.square:
        sizes = [int(size) for size in options.square.split(",")]
        return [(LayerShape("", size, size, 1), [size]) for size in sizes]
    tokens = [int(m) for m in options.tokens.split(",")]
    return [(layer, tokens) for layer in layer_shapes(options.model)]


def layer_sums(measurements: list[Measurement]) -> Sums:
    """Return (M, candidate) -> microseconds of all distinct layers, each by its fastest kernel."""
    best: dict[tuple[int, str, str], float] = {}
    for row in measurements:
        key = (row.m, row.candidate.label, f"{row.n},{row.k}")
        best[key] = min(best.get(key, row.us), row.us)
    sums: Sums = defaultdict(float)
    for (m, label, _), us in best.items():
        sums[m, label] += us
    return dict(sums)


def show(measurements: list[Measurement]) -> None:
    """Print a table per number of tokens."""
    sums = layer_sums(measurements)
    for m in sorted({m for m, _ in sums}):
        rows = {label: us for (at, label), us in sums.items() if at == m}
        print(f"M = {m}")
        for label, us in rows.items():
            ratios = [f"{rows[dense] / us:.2f} of {dense}" for dense in ("dense", "dense fp8", "dense int8")]
            print(f"  {label:<20} {us:9.1f} us  {', '.join(ratios)}{efficiency(label, rows)}")


def efficiency(label: str, rows: dict[str, float]) -> str:
    """Return the efficiency of a pattern, whose K is expanded by gamma = 2 - 2/N (equation 19), as text."""
    kind, _, pattern = label.rpartition(" ")
    if not label.startswith("slide24") or f"{kind} 2:4" not in rows:
        return ""
    keep, window = (int(part) for part in pattern.split(":"))
    gamma = 2 * keep / window
    return f", efficiency {rows[f'{kind} 2:4'] * gamma / rows[label]:.2f}"


if __name__ == "__main__":
    main()

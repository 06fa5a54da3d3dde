"""Whole layers of slide24 beside dense ones in the same precision.

Usage: python benchmarks/slide24.py OUT.csv [--model qwen2.5-7b:fused] [--tokens 64,1024,4096,8192]
       [--patterns 2:4,4:6,6:8,8:10] [--kinds int8,fp8,bf16] [--seconds 0.05]
       python benchmarks/slide24.py OUT.csv --square 1024,2048,4096,8192,16384

Model mode: the linear layers of a model, for each number of tokens, up to 65,536. Square mode: M = N = K.

A line is a kernel on a layer, as `semisparse bench kernels` writes it, all of one process, and `semisparse bench plot
OUT.csv` draws them. Printed are the sums over the layers, their ratio to the dense layers, and the paper's efficiency
(equation 19): the speed-up over dense as a share of what 2:4's speed-up leaves after the expansion, S(2:4) / gamma.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from semisparse.bench import timing
from semisparse.bench.kernels import Measurement, Setting, measure_layer
from semisparse.bench.machines import find_machine
from semisparse.bench.roofline import BASELINE, NO_ZEROS, Candidate
from semisparse.bench.shapes import LayerShape, layer_shapes
from semisparse.bench.table import write_csv

DENSE = {"bf16": {}, "int8": {"kind": "int8"}, "fp8": {"kind": "fp8"}}

SLOW = ("int_mm",)
"""Kernels that are not measured: others of the same weight are faster."""

Sums = dict[tuple[int, str], float]


def main() -> None:
    """Measure, write the CSV and print the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen2.5-7b:fused")
    parser.add_argument("--tokens", default="64,1024,4096,8192")
    parser.add_argument("--square", help="M = N = K, separated by commas, in the place of a model and its tokens")
    parser.add_argument("--patterns", default="2:4,4:6,6:8,8:10")
    parser.add_argument("--kinds", default="int8,fp8,bf16")
    parser.add_argument("--gpu", default="cuda", help="whose rates the floors are of, as `plan` knows it")
    parser.add_argument("--seconds", type=float, default=timing.GPU_SECONDS, help="that each measurement lasts")
    chosen = parser.parse_args()
    timing.GPU_SECONDS = chosen.seconds
    patterns, kinds = chosen.patterns.split(","), {kind: DENSE[kind] for kind in chosen.kinds.split(",")}
    candidates = [Candidate(BASELINE, NO_ZEROS, options) for options in DENSE.values()]
    candidates += [Candidate("slide24", pattern, options) for options in kinds.values() for pattern in patterns]
    device = torch.device("cuda")
    name = "square" if chosen.square else chosen.model
    setting = Setting(name, torch.bfloat16, device, find_machine(chosen.gpu))
    found: list[Measurement] = []
    for layer, tokens in work(chosen):
        for result in measure_layer(setting, layer, tokens, candidates, SLOW):
            if isinstance(result, Measurement):
                found.append(result)
        write_csv(chosen.out, found)  # what is there already outlives an interruption
    show(found)


def work(chosen: argparse.Namespace) -> list[tuple[LayerShape, list[int]]]:
    """List the layers to measure, each with its numbers of tokens."""
    if chosen.square:
        sizes = [int(size) for size in chosen.square.split(",")]
        return [(LayerShape("", size, size, 1), [size]) for size in sizes]
    tokens = [int(m) for m in chosen.tokens.split(",")]
    return [(layer, tokens) for layer in layer_shapes(chosen.model)]


def layer_sums(found: list[Measurement]) -> Sums:
    """(M, what) -> microseconds of all layers of the model, each once, by the fastest kernel of each weight."""
    best: dict[tuple[int, str, str], float] = {}
    for row in found:
        key = (row.m, row.candidate.label, f"{row.n},{row.k}")
        best[key] = min(best.get(key, row.us), row.us)
    sums: Sums = defaultdict(float)
    for (m, label, _), us in best.items():
        sums[m, label] += us
    return dict(sums)


def show(found: list[Measurement]) -> None:
    """Print a table for each number of tokens."""
    sums = layer_sums(found)
    for m in sorted({m for m, _ in sums}):
        rows = {label: us for (at, label), us in sums.items() if at == m}
        print(f"M = {m}")
        for label, us in rows.items():
            ratios = [f"{rows[dense] / us:.2f} of {dense}" for dense in ("dense", "dense fp8", "dense int8")]
            print(f"  {label:<20} {us:9.1f} us  {', '.join(ratios)}{efficiency(label, rows)}")


def efficiency(label: str, rows: dict[str, float]) -> str:
    """Say what share of 2:4's gain a pattern keeps after its expansion of 2 - 2/N (equation 19)."""
    kind, _, pattern = label.rpartition(" ")
    if not label.startswith("slide24") or f"{kind} 2:4" not in rows:
        return ""
    keep, window = (int(part) for part in pattern.split(":"))
    gamma = 2 * keep / window
    return f", efficiency {rows[f'{kind} 2:4'] * gamma / rows[label]:.2f}"


if __name__ == "__main__":
    main()

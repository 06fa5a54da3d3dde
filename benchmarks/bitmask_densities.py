"""The bitmask decode kernel over densities on Qwen2.5-1.5B's shapes, one token (RheoSparse, figure 4).

    python benchmarks/bitmask_densities.py results/h200/bitmask-densities.csv

Needs a GPU. Patterns keep 58 to 6 of every 64 weights, 9 to 91 % zeros; each has cuBLAS's time beside it.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from semisparse.bench.kernels import Measurement, Setup, measure_layer
from semisparse.bench.machines import find_machine, known_gpu
from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import LayerShape
from semisparse.bench.table import write_csv
from semisparse.formats.base import get_format
from semisparse.formats.kernel import Problem
from semisparse.formats.product import structure_of
from semisparse.patterns import parse_pattern

SHAPES = (("q_proj, o_proj", 1536, 1536), ("k_proj, v_proj", 256, 1536), ("gate_proj, up_proj", 8960, 1536))
SHAPES += (("down_proj", 1536, 8960),)
LAYERS = 28
KEPT = (58, 51, 45, 38, 32, 26, 19, 13, 6)
DTYPE, DEVICE = torch.float16, torch.device("cuda")
OTHER_KERNELS = ("gemm", "unpack", "decode_rows")


def main() -> None:
    """Compile all kernels in parallel, then measure; the CSV is written after each shape."""
    machine = known_gpu(torch.cuda.get_device_name()) or find_machine("cuda")
    setup, rows = Setup("qwen2.5-1.5b", DTYPE, DEVICE, machine), list[Measurement]()
    with ThreadPoolExecutor() as pool:
        list(pool.map(_compile, *zip(*((n, k, keep) for _, n, k in SHAPES for keep in KEPT), strict=True)))
    for names, n, k in SHAPES:
        candidates = [Candidate("dense", "0%"), *(Candidate("bitmask", f"{keep}:64") for keep in KEPT)]
        layer = LayerShape(names, n, k, LAYERS * len(names.split(",")))
        for row in measure_layer(setup, layer, (1,), candidates, exclude=OTHER_KERNELS):
            if isinstance(row, Measurement):
                rows.append(row)
                print(n, k, row.candidate.label, row.kernel, f"{row.us:.2f} us, dense {row.dense_us:.2f}", flush=True)
        write_csv(Path(sys.argv[1]), rows)


def _compile(n: int, k: int, keep: int) -> None:
    form, pattern = get_format("bitmask"), parse_pattern(f"{keep}:64")
    packed = form.pack(random_weight(pattern, n, k, DTYPE, DEVICE), pattern).to(DEVICE)
    problem = Problem(1, structure_of(packed.spec), DTYPE, DEVICE)
    next(kernel for kernel in form.kernels if kernel.name == "decode").prepare(problem)


if __name__ == "__main__":
    main()

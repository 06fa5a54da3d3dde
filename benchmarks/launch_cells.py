"""One launch of `auto`'s kernel for each of some matmuls, for a profiler.

    ncu --profile-from-start off --csv --page raw --section SpeedOfLight --section WarpStateStats --section Occupancy
        --section SchedulerStats --section ComputeWorkloadAnalysis -k 'regex:gemm|decode|full|nvjet|cutlass'
        python benchmarks/launch_cells.py gqs-w2:28672,8192,16 dense:4096,4096,256 > profile.csv

Needs a GPU. float16 (or DTYPE=bfloat16). A cell is the weights (a name of few_tokens.py, or dense), N, K and M. Kernels
are launched without PDL, each after the one before has ended. ``--compile`` only compiles.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from checked import launch_for_profiler
from few_tokens import DTYPE, GPU, pack, without_pdl
from torch.nn import functional as F

from semisparse.bench.roofline import random_weight
from semisparse.formats import Packed, get_format
from semisparse.formats.kernel import in_parallel
from semisparse.formats.product import linear, prepare_product, problem_of
from semisparse.patterns import parse_pattern


def main() -> None:
    """Pack, compile, and launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="weights:N,K,M")
    parser.add_argument("--compile", action="store_true", help="launch nothing")
    options = parser.parse_args()
    calls, jobs = [], []
    packs: dict[tuple[str, int, int], Packed] = {}
    for cell in options.cells:
        name, _, sizes = cell.partition(":")
        n, k, m = (int(size) for size in sizes.split(","))
        x = torch.randn(m, k, device=GPU).to(DTYPE)
        if name == "dense":
            dense = random_weight(parse_pattern("0%"), n, k, DTYPE, GPU)
            calls.append((f"{cell} cuBLAS", partial(F.linear, x, dense)))
            continue
        if (name, n, k) not in packs:
            packs[name, n, k] = pack(name, n, k)[1]
        packed = packs[name, n, k]
        chosen = get_format(packed.spec.format).choose(problem_of(x, packed))
        jobs.append(partial(prepare_product, packed, m, DTYPE))
        calls.append((f"{cell} {chosen.name}", partial(linear, x, packed)))
    in_parallel(jobs)
    if options.compile:
        return
    without_pdl()
    for cell, call in calls:
        print(cell, file=sys.stderr, flush=True)
        call()
    launch_for_profiler([call for _, call in calls])


if __name__ == "__main__":
    main()

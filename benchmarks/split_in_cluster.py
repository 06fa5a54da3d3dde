"""Split-K of runtime/expand_gemm through global memory and in a cluster, beside `auto`'s schedule and cuBLAS.

    python benchmarks/split_in_cluster.py results/h200/sweeps/split-in-cluster.csv [--seconds 100] [--tokens 32,256]
    python benchmarks/split_in_cluster.py results/h200/sweeps/gemm-many.csv --whole --tokens 2048,1024,4096

Needs a Hopper GPU. float16, microseconds of CUDA graphs over weights that outgrow the cache. Every output is compared
with float32 before it is timed, twice: all schedules forwards, then backwards. For each weight and M: the schedule that
is chosen, the three schedules with split-K whose estimate is best, both ways, and at 256 tokens and more three
warpgroups in clusters of two that multicast x. With ``--whole`` instead: tiles of 256 tokens with K not split,
and Stream-K, each with and without such clusters.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from checked import checked_error, timed
from every_token import copies_of, inputs
from few_tokens import COLUMNS, DTYPE, GPU, KERNELS, Weights, pack, row, tiles_of
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.errors import KernelError
from semisparse.formats import Packed
from semisparse.formats.bitmask.cuda.schedule import GEMM_RATES
from semisparse.formats.gqs.cuda.wgmma_schedule import RATES as GQS_RATES
from semisparse.formats.kernel import in_parallel
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda.wgmma_schedule import RATES as VECTOR_RATES
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import SPLIT_K, Schedule, choose, fit, h200_microseconds, tile_m_of

SHAPES = ((4096, 4096), (4096, 11008), (12288, 4096), (11008, 4096), (22016, 4096))
RATES = {"bitmask": GEMM_RATES[0], "gqs": GQS_RATES, "vector_nm": VECTOR_RATES, "ec_csr": GEMM_RATES[0]}
MOST_SPLITS = 8
TRIED = 3
"""Schedules with split-K per weight and M."""

WHOLE = ((256, 2, 1), (256, 2, 2))
"""Tokens of a tile, warpgroups and CTAs of a cluster."""

FILLED = 0.4
"""Minimum share of the CTAs that can be resident."""


def schedules(packed: Packed, m: int, whole: bool = False) -> list[Schedule]:
    """Return the schedules to time, the chosen one first; ``whole``: beside it only those of `WHOLE`."""
    weight, facts = tiles_of(packed), device_facts(GPU)
    rates = RATES[packed.spec.format]
    if whole:
        fitted = (fit(weight, facts, *shape, ranges, 1) for ranges in (1, 0) for shape in WHOLE)
        return list(dict.fromkeys([choose(m, weight, facts, rates), *(one for one in fitted if one)]))
    split: dict[Schedule, float] = {}
    for tile_m in sorted({min(128, tile_m_of(m)), tile_m_of(m)}):
        for warpgroups, _, ctas in SPLIT_K[tile_m]:
            for ranges in range(2, min(MOST_SPLITS, weight.column_tiles) + 1):
                found = fit(weight, facts, tile_m, warpgroups, 1, ranges, ctas)
                resident = ctas * facts.sms
                if found and FILLED * resident <= found.ranges(m, weight, facts.sms) <= resident:
                    split[found] = h200_microseconds(found, m, weight, facts.sms, rates)
    best = sorted(split, key=lambda schedule: split[schedule])[:TRIED]
    wide = [fit(weight, facts, 128, 3, 2, ranges, 1) for ranges in (1, 0)] if m >= 256 else []
    both = [one for schedule in best for one in (schedule, dataclasses.replace(schedule, split_in_cluster=True))]
    return list(dict.fromkeys([choose(m, weight, facts, rates), *both, *(one for one in wide if one)]))


def products(packed: Packed, x: Tensor, whole: bool) -> Iterator[tuple[Schedule, Callable[..., Tensor]]]:
    """Yield schedule and matmul."""
    for schedule in schedules(packed, len(x), whole):
        yield schedule, KERNELS[packed.spec.format].prepare(problem_of(x, packed), schedule)


def measure(name: str, dense: Tensor, packed: Packed, m: int, whole: bool) -> Iterator[dict[str, str]]:
    """Time all schedules on one weight, forwards and then backwards."""
    copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
    for x, expected in inputs([m], dense.shape[1], dense):
        check = partial(checked_error, expected, TOLERANCE[DTYPE])
        if name == "bitmask":
            calls: list[Callable[[], Tensor]] = [partial(F.linear, x, one) for one in copies_of(dense)]
            yield row(packed, m, "dense", "cuBLAS", None, timed(calls, check))
        ready = list(products(packed, x, whole))
        for schedule, product in (*ready, *reversed(ready)):
            kernel = "chosen" if schedule == ready[0][0] else "gemm"
            try:
                times = timed([partial(product, x, one, None) for one in copies], check)
            except KernelError as error:
                times = {"error": str(error).replace(",", ";")[:80]}
            yield row(packed, m, name, kernel, schedule, times)


def main() -> None:
    """Measure, and write the CSV after each weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--tokens", default="32,256,128,64,512", help="comma-separated, the most important first")
    parser.add_argument("--formats", default="bitmask,gqs,vector_nm,ec_csr", help="comma-separated")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help=f"how many of {SHAPES}")
    parser.add_argument("--whole", action="store_true", help="time tiles whose K is not split, and Stream-K")
    parser.add_argument("--seconds", type=float, default=100, help="after which the rest is left out")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.01
    begin, tokens = time.monotonic(), [int(m) for m in options.tokens.split(",")]
    weights: Weights = {name: [pack(name, *s) for s in SHAPES[: options.shapes]] for name in options.formats.split(",")}
    all_packed = [packed for of_name in weights.values() for _, packed in of_name]
    jobs = {}  # threads that look for the same kernel would each compile it
    for m in tokens:
        for packed in all_packed:
            problem = problem_of(torch.empty(m, packed.shape[1], device=GPU, dtype=DTYPE), packed)
            kernel = KERNELS[packed.spec.format]
            for schedule in schedules(packed, m, options.whole):
                jobs.setdefault((packed.spec.format, schedule), partial(kernel.prepare, problem, schedule))
    print(f"packed after {time.monotonic() - begin:.0f} s, {len(jobs)} schedules", flush=True)
    in_parallel(jobs.values())
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    begin, rows = time.monotonic(), []
    for m in tokens:
        for index in range(options.shapes):
            for name in weights:
                for found in measure(name, *weights[name][index], m, options.whole):
                    print(*found.values(), flush=True)
                    rows.append(found)
                write_rows(options.csv, rows, COLUMNS)
                if time.monotonic() - begin > options.seconds:
                    print("time is up", flush=True)
                    return


if __name__ == "__main__":
    main()

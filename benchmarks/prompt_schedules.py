"""The GEMMs of a prompt of llama2-7b in many schedules: q, k and v joined, o, gate and up joined, down.

    python benchmarks/prompt_schedules.py OUT.csv [--tokens 512] [--formats gqs,vector_nm,bitmask,ec_csr] [--seconds 60]

Needs a Hopper GPU. bfloat16, in CUDA graphs over weights that outgrow the cache; every output is compared with float32
before it is timed. ``chosen`` marks the schedule that the format's kernel takes. All builds are compiled first, in a
thread per core.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from checked import CHECKED_ROWS, checked_error, timed
from expand_gemm import COLUMNS, SCHEDULE_COLUMNS, Weight, swept_kernel
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.formats import get_format
from semisparse.formats.ec_csr.cuda import gemm as ec_csr
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda.wgmma_schedule import choose_schedule
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import Schedule, Tiles, choose, fit

GPU = torch.device("cuda")
DTYPE = torch.bfloat16
SHAPES = ((4096, 4096), (4096, 11008), (12288, 4096), (22016, 4096))
WEIGHTS = {"gqs": ("g16@50%", "w4"), "vector_nm": ("16:32v32", ""), "bitmask": ("32:64", ""), "ec_csr": ("70%", "")}
CANDIDATES = (
    *((128, 3, 1, split, 1) for split in (0, 1)),
    *((128, 2, 1, split, 1) for split in (0, 1)),
    (128, 1, 1, 1, 2),
    (128, 2, 2, 1, 1),
    *((192, 2, 1, split, 1) for split in (0, 1)),
    *((256, 2, 1, split, 1) for split in (0, 1, 2, 3)),
    *((256, 2, 2, split, 1) for split in (0, 1)),
    *((256, 1, 2, split, 1) for split in (0, 1)),
)
"""tile_m, warpgroups, cluster, split_k, CTAs per SM."""


def kernel_of(problem: Problem) -> tuple[ModuleType, Tiles, Schedule]:
    """Return the module of the kernel, the weight's tiles and the chosen schedule."""
    if problem.spec.format == "ec_csr":
        tiles = tiles_in(problem.spec)
        return ec_csr, tiles, choose(problem.m, tiles, device_facts(GPU), ec_csr.RATES)
    module, tiles, chosen = swept_kernel(problem)
    if problem.spec.format == "vector_nm":
        chosen = choose_schedule(problem.m, tiles, device_facts(GPU))
    return module, tiles, chosen


def schedules(problem: Problem) -> list[Schedule]:
    """Return the schedules to time, the chosen one first."""
    _, tiles, chosen = kernel_of(problem)
    facts = device_facts(GPU)
    fitting = [schedule for c in CANDIDATES if (schedule := fit(tiles, facts, *c)) is not None]
    resident = [
        schedule
        for schedule in fitting  # CTAs that share a part of K wait for one another
        if schedule.split_k < 2
        or schedule.ranges(problem.m, tiles, facts.sms) * schedule.cluster <= facts.sms * schedule.ctas_per_sm
    ]
    return list(dict.fromkeys([chosen, *resident]))


def main() -> None:
    """Compile, measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", default="gqs,vector_nm,bitmask,ec_csr")
    parser.add_argument("--seconds", type=float, default=60, help="of measuring, after which the rest is left out")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.008
    m, start = options.tokens, time.perf_counter()
    weights = [Weight(name, *WEIGHTS[name], n, k, DTYPE) for n, k in SHAPES for name in options.formats.split(",")]
    packed = {}
    for weight in weights:
        packed[weight] = get_format(weight.format).arrange(weight.pack(), "cuda")
    x = {k: torch.randn(m, k, device=GPU).to(DTYPE) for _, k in SHAPES}
    problems = {weight: problem_of(x[weight.k], of) for weight, of in packed.items()}
    print(f"packed after {time.perf_counter() - start:.0f} s", flush=True)

    def load(problem: Problem, schedule: Schedule) -> None:
        try:
            kernel_of(problem)[0].prepare(problem, schedule)
        except Exception as error:
            print(problem.spec.format, schedule, str(error)[:200], flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: load(*job), [(p, s) for p in problems.values() for s in schedules(p)]))
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, str]] = []
    begin, dense_done = time.perf_counter(), set()

    def add(row: dict[str, str]) -> None:
        rows.append(row)
        write_rows(options.csv, rows, COLUMNS)
        print(*(row[c] for c in ("n", "k", "format", "kernel", "chosen", *SCHEDULE_COLUMNS, "us")), flush=True)

    for weight, of in packed.items():
        if time.perf_counter() - begin > options.seconds:
            print(f"time is up at {weight}", flush=True)
            break
        dense, own = of.unpack(), x[weight.k]
        expected = F.linear(own[-CHECKED_ROWS:].float(), dense.float())
        check = partial(checked_error, expected, 2 * TOLERANCE[DTYPE])
        if (weight.n, weight.k) not in dense_done:
            dense_done.add((weight.n, weight.k))
            count = max(1, timing.CACHES * device_facts(GPU).cache_bytes // dense.nbytes)
            copies = [dense, *(dense.clone() for _ in range(count))]
            add(weight.row(m, "cuBLAS", **timed([partial(F.linear, own, w) for w in copies], check)))
        copies = timing.rotating_copies(of, device_facts(GPU).cache_bytes)
        module, _, chosen = kernel_of(problems[weight])
        for schedule in schedules(problems[weight]):
            try:
                product = module.prepare(problems[weight], schedule)
                more = timed([partial(product, own, copy, None) for copy in copies], check) | asdict(schedule)
            except Exception as error:
                print("failed", weight.format, schedule, str(error)[:200], flush=True)
                continue
            add(weight.row(m, "expand", **more, chosen=int(schedule == chosen)))


if __name__ == "__main__":
    main()

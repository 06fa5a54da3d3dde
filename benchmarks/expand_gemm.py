"""The GEMMs of runtime/expand_gemm in many schedules, beside the formats' other kernels and cuBLAS.

    python benchmarks/expand_gemm.py results/h200/sweeps/expand-gemm.csv [--seconds 150] [--dtype bfloat16] [--only gqs]

Needs a Hopper GPU. Times are of CUDA graphs over weights that outgrow the cache; every output is compared with float32
before it is timed. A row with "chosen" is the schedule that the kernel chooses. Builds are compiled first, in a thread
per core. After ``--seconds`` no more schedules are timed; the last line has the number of those left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from checked import CHECKED_ROWS, checked_error, timed
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.bench.roofline import random_weight
from semisparse.formats import Packed, get_format
from semisparse.formats.bitmask.cuda import gemm as bitmask
from semisparse.formats.bitmask.cuda import schedule as bitmask_schedule
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.gqs.cuda import gemm_wgmma as gqs
from semisparse.formats.gqs.cuda import wgmma_schedule as gqs_schedule
from semisparse.formats.gqs.storage.disk import code_bits, group_size
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of, structure_of
from semisparse.formats.vector_nm.cuda import gemm_wgmma as vector_nm
from semisparse.formats.vector_nm.cuda import wgmma_schedule as vector_nm_schedule
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import Schedule, Tiles, choose, fit, tile_m_of

GPU = torch.device("cuda")
SHAPES = "28672,8192,4096,4096,11008,4096,4096,11008"
TOKENS = "1,8,16,32,64,128,256,1024"
SWEPT_TOKENS = (16, 32, 64, 128, 256)

WEIGHTS = (
    ("gqs", "g16@50%", "w4"),
    ("gqs", "g128@0%", "w4"),
    ("gqs", "g64@0%", "w2"),
    ("gqs", "g16@50%", "w8"),
    ("vector_nm", "16:32v32", ""),
    ("bitmask", "32:64", ""),
)

STREAMED = {
    16: ((4, 1, 1), (4, 2, 1)),
    32: ((4, 1, 1), (4, 2, 1), (2, 1, 2)),
    64: ((4, 1, 1), (4, 2, 1), (3, 2, 1), (2, 1, 2)),
    128: ((3, 1, 1), (3, 2, 1), (2, 2, 1)),
    192: ((2, 1, 1), (2, 2, 1)),
    256: ((2, 1, 1), (2, 2, 1)),
}
"""Warpgroups per CTA, CTAs per cluster and per SM to time with Stream-K, by tile_m."""

SPLIT = {
    16: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    32: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    64: ((4, 1, 1), (2, 1, 2), (1, 1, 3)),
    128: ((3, 1, 1), (2, 1, 1), (1, 1, 2)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1),),
}
"""The same, with about as many CTAs per output tile as fill the SMs once."""

SCHEDULE_COLUMNS = tuple(Schedule.__dataclass_fields__)
COLUMNS = (
    *("n", "k", "m", "dtype", "format", "pattern", "kind", "kernel", "chosen"),
    *SCHEDULE_COLUMNS,
    *("us", "low_us", "high_us", "error", "bits_per_weight", "machine"),
)


@dataclass(frozen=True)
class Weight:
    """A weight of the bench, and the kernel that is swept on it."""

    format: str
    pattern: str
    kind: str
    n: int
    k: int
    dtype: torch.dtype

    def pack(self) -> Packed:
        """Draw the weight, and pack it on the GPU."""
        pattern = parse_pattern(self.pattern)
        weight = random_weight(pattern, self.n, self.k, self.dtype, GPU)
        options = {"kind": self.kind} if self.kind else {}
        return get_format(self.format).pack(weight, pattern, **options).to(GPU)

    def row(self, m: int, kernel: str, **more: Any) -> dict[str, str]:
        """Return a CSV row."""
        values = {"n": self.n, "k": self.k, "m": m, "dtype": str(self.dtype).removeprefix("torch."), "kernel": kernel}
        values |= {"format": self.format, "pattern": self.pattern, "kind": self.kind, **more}
        values["machine"] = device_facts(GPU).name
        return {column: str(values.get(column, "")) for column in COLUMNS}


def swept_kernel(problem: Problem) -> tuple[ModuleType, Tiles, Schedule]:
    """Return the kernel, the weight's tiles and the schedule that the kernel chooses."""
    facts, (n, k) = device_facts(GPU), problem.spec.shape
    if problem.spec.format == "gqs":
        size = group_size(problem.pattern)
        bits = code_bits(problem.params, size)
        tiles = gqs_schedule.tiles_of(n, k, bits, size)
        return gqs, tiles, choose(problem.m, tiles, facts, gqs_schedule.RATES)
    if problem.spec.format == "vector_nm":
        tiles = vector_nm_schedule.tiles_of(n, k, vectors_of(problem.pattern))
        return vector_nm, tiles, choose(problem.m, tiles, facts, vector_nm_schedule.RATES)
    tiles = bitmask_schedule.gemm_tiles(tiling(problem.spec))
    return bitmask, tiles, choose(problem.m, tiles, facts, bitmask_schedule.GEMM_RATES[0])


def schedules(problem: Problem) -> list[Schedule]:
    """Return the schedules to time, the chosen one first."""
    _, tiles, chosen = swept_kernel(problem)
    facts, m, found = device_facts(GPU), problem.m, [chosen]
    if m not in SWEPT_TOKENS:
        return found
    tile_m = tile_m_of(m)
    candidates = [(tile_m, w, cluster, 0, ctas) for w, cluster, ctas in STREAMED[tile_m]]
    for w, cluster, ctas in SPLIT[tile_m]:
        output_tiles = -(-tiles.row_tiles // (4 * w)) * -(-m // tile_m)
        filling = max(1, ctas * facts.sms // output_tiles)
        splits = {filling, filling + 1} if filling > 1 else {1, 2}
        candidates += [(tile_m, w, cluster, split, ctas) for split in splits if split <= min(8, tiles.column_tiles)]
    found += [schedule for c in candidates if (schedule := fit(tiles, facts, *c)) is not None]
    return list(dict.fromkeys(found))


def measure(weight: Weight, packed: Packed, tokens: list[int], with_dense: bool) -> Iterator[dict[str, str]]:
    """Time every kernel on one weight."""
    facts = device_facts(GPU)
    copies = timing.rotating_copies(packed, facts.cache_bytes)
    dense = packed.unpack()
    count = max(1, timing.CACHES * facts.cache_bytes // dense.nbytes) if with_dense else 0
    dense_copies = [dense, *(dense.clone() for _ in range(count))]
    bits = f"{packed.bits_per_weight:.2f}"
    for m in tokens:
        x = torch.randn(m, weight.k, device=GPU).to(weight.dtype)
        problem = problem_of(x, packed)
        expected = F.linear(x[-CHECKED_ROWS:].float(), dense.float())
        check = partial(checked_error, expected, 2 * TOLERANCE[weight.dtype])
        if with_dense:
            yield weight.row(m, "cuBLAS", **timed([partial(F.linear, x, w) for w in dense_copies], check))
        kernel, _, chosen = swept_kernel(problem)
        for other in get_format(weight.format).kernels:
            if other.device == "cuda" and other.prepare is not kernel.prepare and other.refusal(problem) is None:
                product = other.prepare(problem)
                calls = [partial(product, x, copy, None) for copy in copies]
                yield weight.row(m, other.name, **timed(calls, check), bits_per_weight=bits)
        for schedule in schedules(problem):
            product = kernel.prepare(problem, schedule)
            more = timed([partial(product, x, copy, None) for copy in copies], check) | asdict(schedule)
            yield weight.row(m, "expand", **more, bits_per_weight=bits, chosen=int(schedule == chosen))


def prepare_all(packed: dict[Weight, Packed], tokens: list[int]) -> None:
    """Compile and load every build that will be timed, in a thread per core."""
    start = time.perf_counter()

    def load(problem: Problem, schedule: Schedule) -> None:
        swept_kernel(problem)[0].prepare(problem, schedule)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for weight, of in packed.items():
            for m in tokens:
                problem = Problem(problem_of(torch.empty(m, 1), of).m, structure_of(of.spec), weight.dtype, GPU)
                jobs += [pool.submit(load, problem, schedule) for schedule in schedules(problem)]
        for job in jobs:
            job.result()
    print(f"loaded {len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Measure, and write the CSV after each weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default=TOKENS, help="comma-separated")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--only", default="", help="a format")
    parser.add_argument("--seconds", type=float, default=150, help="after which the rest is left out")
    options = parser.parse_args()
    start, dtype = time.perf_counter(), getattr(torch, options.dtype)
    timing.GPU_SECONDS = 0.01
    sizes, tokens = [int(size) for size in options.shapes.split(",")], [int(m) for m in options.tokens.split(",")]
    shapes = list(zip(sizes[::2], sizes[1::2], strict=True))
    weights = [Weight(*w, n, k, dtype) for n, k in shapes for w in WEIGHTS if options.only in w[0]]
    rows: list[dict[str, str]] = []
    for n, k in shapes:
        packed = {weight: weight.pack() for weight in weights if (weight.n, weight.k) == (n, k)}
        prepare_all(packed, tokens)
        for number, (weight, of) in enumerate(packed.items()):
            for row in measure(weight, of, tokens, number == 0):
                rows.append(row)
                print(*(row[c] for c in ("n", "k", "m", "format", "pattern", "kind", "kernel", "chosen")), end=" ")
                print(*(row[c] for c in (*SCHEDULE_COLUMNS, "us")), flush=True)
                if time.perf_counter() - start > options.seconds:
                    break
            write_rows(options.csv, rows, COLUMNS)
        if time.perf_counter() - start > options.seconds:
            print(f"time is up at {n} x {k}", flush=True)
            break
        del packed
        torch.cuda.empty_cache()
    print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

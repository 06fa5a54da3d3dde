"""1 to 1,024 tokens through format gqs: the kernel `gemm` in several schedules, beside decode, unpack and cuBLAS.

    python benchmarks/gqs_gemm.py results/h200/gqs-gemm.csv [--seconds 150] [--dtype bfloat16] [--shapes 4096,4096]

Needs a GPU. Times are of CUDA graphs over weights that outgrow the cache; every output is compared with float32 before
it is timed. A row with "chosen" is the schedule that the kernel chooses. Builds are compiled first, in a thread per
core. After ``--seconds`` no more schedules are timed; the last line has the number of those left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checked import CHECKED_ROWS, checked_error, timed
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.formats import Packed, get_format
from semisparse.formats.gqs.cuda import gemm
from semisparse.formats.gqs.cuda.gemm_schedule import GemmSchedule, choose_gemm
from semisparse.formats.gqs.storage.disk import code_bits, group_size
from semisparse.formats.kernel import Problem
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import DeviceFacts, device_facts

GPU = torch.device("cuda")
GQS = get_format("gqs")
SHAPES = "4096,4096,11008,4096,4096,11008,28672,8192"
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
WEIGHTS = (("w4", "g16@50%"), ("w4", "g128@0%"), ("w2", "g64@0%"), ("w8", "g16@50%"))

SWEPT_TOKENS = (8, 16, 32, 64, 128, 256)
"""Numbers of tokens for which every schedule is timed; for the others only the chosen one is."""

VARIED_TOKENS = (8, 64)
"""Numbers of tokens for which the chosen schedule is also timed with other stages, k-tiles and prefetches."""

SHAPES_BELOW_33 = ((1, 4, 2, 3), (2, 2, 2, 3), (4, 1, 2, 3), (4, 1, 1, 3), (4, 2, 2, 1), (8, 1, 2, 1))
SHAPES_ABOVE_32 = ((4, 1, 2, 2), (2, 2, 2, 2), (4, 2, 2, 1), (8, 1, 2, 1))
"""warps_n, warps_k, row_tiles and CTAs per SM, by the tokens of a tile."""

SCHEDULE_COLUMNS = tuple(GemmSchedule.__dataclass_fields__)
COLUMNS = (
    *("n", "k", "m", "dtype", "kind", "pattern", "kernel", "chosen"),
    *SCHEDULE_COLUMNS,
    *("us", "low_us", "high_us", "error", "bits_per_weight", "machine"),
)


@dataclass(frozen=True)
class Setup:
    """The fields that all rows of a weight share."""

    n: int
    k: int
    kind: str
    pattern: str
    dtype: torch.dtype
    facts: DeviceFacts

    def row(self, m: int, kernel: str, **more: Any) -> dict[str, str]:
        """Return a CSV row."""
        values = {"n": self.n, "k": self.k, "m": m, "dtype": str(self.dtype).removeprefix("torch."), "kernel": kernel}
        values |= {"kind": self.kind, "pattern": self.pattern, "machine": self.facts.name, **more}
        return {column: str(values.get(column, "")) for column in COLUMNS}


def schedules(problem: Problem, facts: DeviceFacts) -> list[GemmSchedule]:
    """Return the schedules to time, the chosen one first."""
    m, n, k, size = problem.m, problem.n, problem.k, group_size(problem.pattern)
    bits = code_bits(problem.params, size)
    chosen = choose_gemm(m, n, k, bits, size, facts)
    found = [chosen]
    if m in VARIED_TOKENS:
        found += [replace(chosen, **change) for change in ({"stages": 2}, {"stages": 4}, {"prefetch": 1})]
        found += [replace(chosen, k_tile=64, prefetch=prefetch) for prefetch in (2, 4)]
    for tile_m in {chosen.tile_m, 64, 96} if m >= 128 else {chosen.tile_m}:
        for shape in (SHAPES_BELOW_33 if tile_m <= 32 else SHAPES_ABOVE_32) if m in SWEPT_TOKENS else ():
            warps_n, warps_k, row_tiles, ctas = shape
            base = replace(
                chosen,
                tile_m=tile_m,
                warps_n=warps_n,
                warps_k=warps_k,
                row_tiles=row_tiles,
                ctas_per_sm=ctas,
                split_k=1,
            )
            filling = max(1, ctas * facts.sms // (base.row_ctas(n) * -(-m // tile_m)))
            splits = {min(split, base.k_tiles(k, size), 16) for split in (filling, max(1, filling // 2))}
            found += [replace(base, split_k=split_k) for split_k in sorted(splits)]
    possible = (s for s in dict.fromkeys(found) if s.fits(facts) and s.slices(bits, size) % s.prefetch == 0)
    return [chosen, *(schedule for schedule in possible if schedule != chosen)]


def compile_all(problems: Sequence[Problem], facts: DeviceFacts) -> None:
    """Compile every build that will be timed, in a thread per core."""
    builds = set()
    for p in problems:
        size = group_size(p.pattern)
        for schedule in schedules(p, facts):
            defines = schedule.defines(p.dtype, code_bits(p.params, size), size, p.k % 8 == 0)
            builds.add(gemm.SOURCE.build("semisparse_gqs_gemm", defines, schedule.shared_bytes))
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(build.compile, facts.arch) for build in builds]:
            job.result()
    print(f"compiled {len(builds)} builds in {time.perf_counter() - start:.0f} s", flush=True)


def pack(setup: Setup) -> Packed:
    """Return a random weight whose rows keep different numbers of groups."""
    generator = torch.Generator(GPU).manual_seed(setup.n * setup.k)
    drawn = torch.randn(setup.n, setup.k, generator=generator, device=GPU)
    drawn *= (torch.randn(setup.n, 1, generator=generator, device=GPU) / 10).exp() / setup.k**0.5
    pattern = parse_pattern(setup.pattern)
    weight = (drawn * pattern.mask(drawn.abs())).to(setup.dtype)
    return GQS.pack(weight, pattern, kind=setup.kind).to(GPU)


def measure(setup: Setup, tokens: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time every kernel on one weight."""
    packed = pack(setup)
    copies = timing.rotating_copies(packed, setup.facts.cache_bytes)
    dense = packed.unpack()
    dense_copies = [
        dense,
        *(dense.clone() for _ in range(max(1, timing.CACHES * setup.facts.cache_bytes // dense.nbytes))),
    ]
    bits = f"{packed.bits_per_weight:.2f}"
    for m in tokens:
        x = torch.randn(m, setup.k, device=GPU).to(setup.dtype)
        problem = problem_of(x, packed)
        expected = F.linear(x[-CHECKED_ROWS:].float(), dense.float())
        check = partial(checked_error, expected, TOLERANCE[setup.dtype])
        if (setup.kind, setup.pattern) == WEIGHTS[0]:
            calls = [partial(F.linear, x, weight) for weight in dense_copies]
            yield setup.row(m, "cuBLAS", **timed(calls, check))
        for kernel in GQS.kernels:
            if kernel.device != "cuda" or kernel.name == "gemm" or kernel.refusal(problem):
                continue
            product = kernel.prepare(problem)
            calls = [partial(product, x, copy, None) for copy in copies]
            yield setup.row(m, kernel.name, **timed(calls, check), bits_per_weight=bits)
        found = schedules(problem, setup.facts)
        for schedule in found:
            product = gemm.prepare(problem, schedule)
            calls = [partial(product, x, copy, None) for copy in copies]
            more = {**asdict(schedule), "bits_per_weight": bits, **timed(calls, check)}
            yield setup.row(m, "gemm", **more, chosen=int(schedule == found[0]))


def main() -> None:
    """Measure, and write the CSV after each weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma-separated")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--seconds", type=float, default=150, help="after which the rest is left out")
    options = parser.parse_args()
    start, facts, dtype = time.perf_counter(), device_facts(GPU), getattr(torch, options.dtype)
    timing.GPU_SECONDS = 0.01
    sizes = [int(size) for size in options.shapes.split(",")]
    tokens = [int(m) for m in options.tokens.split(",")]
    setups = [
        Setup(n, k, kind, pattern, dtype, facts)
        for n, k in zip(sizes[::2], sizes[1::2], strict=True)
        for kind, pattern in WEIGHTS
    ]
    compile_all([problem for setup in setups for problem in problems_of(setup, tokens)], facts)
    rows: list[dict[str, str]] = []
    for number, setup in enumerate(setups):
        for row in measure(setup, tokens):
            rows.append(row)
            print(*(row[column] for column in ("n", "k", "m", "kind", "pattern", "kernel", "chosen")), end=" ")
            print(*(row[column] for column in (*SCHEDULE_COLUMNS, "us")), flush=True)
            if time.perf_counter() - start > options.seconds:
                break
        write_rows(options.csv, rows, COLUMNS)
        if time.perf_counter() - start > options.seconds:
            print(f"time is up at weight {number + 1} of {len(setups)}", flush=True)
            break
        torch.cuda.empty_cache()
    print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)


def problems_of(setup: Setup, tokens: Sequence[int]) -> list[Problem]:
    """Return the problems of a weight, without packing it: a small one has the same pattern and kind."""
    small = GQS.pack(torch.ones(16, 512, dtype=setup.dtype), _dense_pattern(setup.pattern), kind=setup.kind)
    params = type(small.spec.params)({**GQS.structure(small.spec).params, "rows": setup.n})
    spec = replace(GQS.structure(small.spec), shape=(setup.n, setup.k), params=params)
    return [Problem(m, spec, setup.dtype, GPU) for m in tokens]


def _dense_pattern(pattern: str) -> str:
    return pattern.partition("@")[0] + "@0%"


if __name__ == "__main__":
    main()

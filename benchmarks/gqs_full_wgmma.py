"""`gemm_wgmma` on a weight of which nothing is dropped: its schedules, with the masks read and not read.

    python benchmarks/gqs_full_wgmma.py results/h200/sweeps/gqs-full-wgmma.csv [--seconds 80] [--shapes 4096,4096]

Needs a Hopper GPU. As gqs_full.py; ``full`` is 1 where masks are not read, ``chosen`` 1 for the schedule that the
kernel chooses.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from gqs_full import CHECKED_ROWS, GPU, Setup, pack
from gqs_gemm import checked_error, timed
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.errors import KernelError
from semisparse.formats.gqs.cuda import gemm_wgmma
from semisparse.formats.gqs.cuda.wgmma_schedule import RATES, tiles_of
from semisparse.formats.product import problem_of
from semisparse.quant.group import KINDS
from semisparse.runtime.device import DeviceFacts, device_facts
from semisparse.runtime.expand_gemm import Schedule, choose, fit

SHAPES = ((1, 1, 3), (1, 1, 4), (2, 1, 2), (3, 1, 1), (4, 1, 1), (2, 1, 1))
"""Warpgroups per CTA, CTAs per cluster, CTAs per SM."""

TILES_M = {16: (16,), 32: (32,), 64: (64,), 128: (128,), 256: (128, 256)}
COLUMNS = (
    *("n", "k", "m", "dtype", "kind", "size", "full", "chosen"),
    *Schedule.__dataclass_fields__,
    *("us", "low_us", "high_us", "error", "machine"),
)


def schedules(setup: Setup, m: int, facts: DeviceFacts) -> list[Schedule]:
    """Return the schedules to time, the chosen one first."""
    tiles = tiles_of(setup.n, setup.k, KINDS[setup.kind], setup.size, True)
    chosen = choose(m, tiles, facts, RATES)
    found = [chosen]
    for tile_m in TILES_M[m]:
        for warpgroups, cluster, ctas in SHAPES:
            unsplit = fit(tiles, facts, tile_m, warpgroups, cluster, 1, ctas)
            if unsplit is None or (tile_m >= 128 and warpgroups * ctas * tile_m > 512):
                continue
            filling = facts.sms * ctas // unsplit.tiles(m, tiles)
            splits = {0, 1} if filling < 2 else {0, min(filling, 8), max(1, min(filling, 8) // 2)}
            found += [replace(unsplit, split_k=split_k) for split_k in sorted(splits)]
            if unsplit.x_stages > 1:
                found.append(replace(unsplit, split_k=0, x_stages=1))
    return list(dict.fromkeys(found))


def measure(setup: Setup, facts: DeviceFacts) -> Iterator[dict[str, str]]:
    """Time the schedules on one weight; the chosen one also with masks."""
    packed = pack(setup)
    copies = timing.rotating_copies(packed, facts.cache_bytes)
    dense = packed.unpack()
    for m in TILES_M:
        x = torch.randn(m, setup.k, device=GPU).to(setup.dtype)
        problem = problem_of(x, packed)
        masked = replace(problem, spec=replace(problem.spec, params=problem.params.without("full")))
        check = partial(checked_error, F.linear(x[-CHECKED_ROWS:].float(), dense.float()), TOLERANCE[setup.dtype])
        found = schedules(setup, m, facts)
        for full, schedule in [(0, None), *((1, schedule) for schedule in found)]:
            try:
                call = gemm_wgmma.prepare(problem if full else masked, schedule)
                figures = timed([partial(call, x, copy, None) for copy in copies], check)
            except KernelError as error:
                print("failed", setup, m, schedule, str(error)[:200], flush=True)
                continue
            values = {"n": setup.n, "k": setup.k, "m": m, "kind": setup.kind, "size": setup.size, "full": full}
            values |= {"dtype": str(setup.dtype).removeprefix("torch."), "machine": facts.name, **figures}
            values |= {"chosen": int(schedule in (None, found[0])), **(asdict(schedule) if schedule else {})}
            yield {column: str(values.get(column, "")) for column in COLUMNS}


def main() -> None:
    """Measure, and write the CSV after each weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default="28672,8192,4096,4096,11008,4096,4096,11008")
    parser.add_argument("--seconds", type=float, default=80)
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.01
    facts, sizes = device_facts(GPU), [int(size) for size in options.shapes.split(",")]
    setups = [Setup(n, k, "w4", 128, torch.float16) for n, k in zip(sizes[::2], sizes[1::2], strict=True)]
    builds = {
        tuple(gemm_wgmma.gemm_defines(setup.dtype, 4, 128, schedule, True).items())
        for setup in setups
        for m in TILES_M
        for schedule in schedules(setup, m, facts)
    }
    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        source = gemm_wgmma.SOURCE
        list(pool.map(lambda d: source.build("semisparse_gqs_gemm_wgmma", dict(d)).compile(facts.arch), builds))
    print(f"compiled {len(builds)} builds in {time.perf_counter() - start:.0f} s", flush=True)
    start, rows = time.perf_counter(), []
    for setup in setups:
        for row in measure(setup, facts):
            rows.append(row)
            print(*row.values(), flush=True)
            if time.perf_counter() - start > options.seconds:
                break
        write_rows(options.csv, rows, COLUMNS)
        if time.perf_counter() - start > options.seconds:
            print(f"time is up at {setup}", flush=True)
            break


if __name__ == "__main__":
    main()

"""1 to 64 tokens through format gqs with nothing dropped: `full` in many schedules, beside the others and cuBLAS.

    python benchmarks/gqs_full.py results/h200/sweeps/gqs-full.csv [--seconds 150] [--shapes 4096,4096]

Needs a GPU. Times are of CUDA graphs over weights that outgrow the cache; every output is compared with float32 before
it is timed. A row with "chosen" is the schedule that the kernel chooses. Builds are compiled first, in a thread per
core; those that spill registers are left out. After ``--seconds`` no more are timed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from checked import CHECKED_ROWS, checked_error, timed
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.gqs.cuda import full
from semisparse.formats.gqs.cuda.full_schedule import FullSchedule, can_multiply_codes, choose_full, row_tile_bytes
from semisparse.formats.kernel import bucket_of
from semisparse.formats.product import problem_of
from semisparse.quant.group import KINDS
from semisparse.runtime.device import DeviceFacts, device_facts

GPU = torch.device("cuda")
GQS = get_format("gqs")
SHAPES = "28672,8192,4096,4096,11008,4096,4096,11008"
TOKENS = "1,8,16,32,64"
WEIGHTS = "w4:128:float16,w4:128:bfloat16,w2:64:float16,w3:128:float16"
OTHERS = ("gemm_wgmma", "gemm")

WARPS_N, WARPS_K = (1, 2, 3, 4, 6, 7, 8, 11, 14, 16), (1, 2, 4, 8)
ROW_TILES, CTAS = (1, 2, 4), (1, 2, 3)
STAGES, SPANS = (2, 3, 4), (1, 4)
COLUMNS = (
    *("n", "k", "m", "dtype", "kind", "size", "kernel", "chosen"),
    *FullSchedule.__dataclass_fields__,
    *("us", "low_us", "high_us", "error", "machine"),
)


@dataclass(frozen=True)
class Setup:
    """A weight."""

    n: int
    k: int
    kind: str
    size: int
    dtype: torch.dtype

    def row(self, m: int, kernel: str, **more: Any) -> dict[str, str]:
        """Return a CSV row."""
        values = {"m": m, "kernel": kernel, **asdict(self), **more}
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        return {column: str(values.get(column, "")) for column in COLUMNS}


def schedules(setup: Setup, m: int, facts: DeviceFacts, most: int) -> list[FullSchedule]:
    """Return schedules to time, the chosen one first: ``most`` that load SMs evenly, with several stages and spans."""
    bits = KINDS[setup.kind]
    chosen = choose_full(m, setup.n, setup.k, bits, setup.size, facts)
    tile_m = next(tokens for tokens in (8, 16, 32, 64) if m <= tokens)
    codes = can_multiply_codes(bits, setup.size) and tile_m <= 16
    scored = []
    for warps_n, warps_k, rows, ctas in product(WARPS_N, WARPS_K, ROW_TILES, CTAS):
        schedule = FullSchedule(tile_m, warps_n, warps_k, rows, 3, ctas, codes)
        warps = ctas * warps_n * warps_k
        if not 6 <= warps <= 16 or rows * tile_m > 128:
            continue
        slots = facts.sms * ctas
        waves = -(-schedule.row_ctas(setup.n) // slots)
        even = setup.n / 16 / (waves * slots * warps_n * rows)
        flight = 2 * warps * rows * row_tile_bytes(bits, setup.size)
        score = even * min(1, flight / 32768) ** 0.3 - 0.05 * (waves - 1) - 0.02 * (warps < 12)
        scored.append((score - 0.04 * (rows == 1 and tile_m > 8), schedule))
    best = [schedule for _, schedule in sorted(scored, key=lambda pair: -pair[0])][:most]
    varied = [replace(base, stages=stages, x_span=span) for base in best for stages in STAGES for span in SPANS]
    if tile_m <= 16:
        varied += [replace(base, stages=stages, x_tokens=bucket_of(m)) for base in best for stages in STAGES]
    fitting = [schedule for schedule in varied if schedule.fits(setup.k, bits, setup.size, facts)]
    return [chosen, *(schedule for schedule in dict.fromkeys(fitting) if schedule != chosen)]


def compile_all(setups: Sequence[Setup], tokens: Sequence[int], facts: DeviceFacts, most: int) -> set[tuple[Any, ...]]:
    """Compile every build that will be timed, in a thread per core. Return the defines of those that spill."""
    defines = {
        tuple(schedule.defines(setup.dtype, KINDS[setup.kind], setup.size).items())
        for setup in setups
        for m in tokens
        for schedule in schedules(setup, m, facts, most)
    }
    start = time.perf_counter()

    def spills(macros: tuple[Any, ...]) -> bool:
        cubin = full.SOURCE.build("semisparse_gqs_full", dict(macros)).compile(facts.arch)
        return cubin.resources["semisparse_gqs_full"].spills

    ordered = sorted(defines)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {macros for macros, spilled in zip(ordered, pool.map(spills, ordered), strict=True) if spilled}
    print(f"compiled {len(defines)} builds in {time.perf_counter() - start:.0f} s; {len(found)} spill", flush=True)
    return found


def pack(setup: Setup) -> Packed:
    """Return a random weight."""
    generator = torch.Generator(GPU).manual_seed(setup.n * setup.k)
    drawn = torch.randn(setup.n, setup.k, generator=generator, device=GPU) / setup.k**0.5
    return GQS.pack(drawn.to(setup.dtype), f"g{setup.size}@0%", kind=setup.kind).to(GPU)


def measure(
    setup: Setup, tokens: Sequence[int], facts: DeviceFacts, most: int, spilling: set[tuple[Any, ...]]
) -> Iterator[dict[str, str]]:
    """Time every kernel on one weight."""
    packed = pack(setup)
    copies = timing.rotating_copies(packed, facts.cache_bytes)
    dense = packed.unpack()
    more = max(1, timing.CACHES * facts.cache_bytes // dense.nbytes)
    dense_copies = [dense, *(dense.clone() for _ in range(more))]
    for m in tokens:
        x = torch.randn(m, setup.k, device=GPU).to(setup.dtype)
        problem = problem_of(x, packed)
        check = partial(checked_error, F.linear(x[-CHECKED_ROWS:].float(), dense.float()), TOLERANCE[setup.dtype])
        yield setup.row(m, "cuBLAS", **timed([partial(F.linear, x, weight) for weight in dense_copies], check))
        for kernel in GQS.kernels:
            if kernel.name in OTHERS and not kernel.refusal(problem):
                call = kernel.prepare(problem)
                yield setup.row(m, kernel.name, **timed([partial(call, x, copy, None) for copy in copies], check))
        found = schedules(setup, m, facts, most)
        for schedule in found:
            macros = schedule.defines(setup.dtype, KINDS[setup.kind], setup.size)
            if tuple(macros.items()) in spilling:
                continue
            fields = {**asdict(schedule), "codes": int(schedule.codes), "chosen": int(schedule == found[0])}
            try:
                call = full.prepare(replace(problem, m=m), schedule)
                figures = timed([partial(call, x, copy, None) for copy in copies], check)
            except KernelError as error:
                print("failed", setup, m, schedule, str(error)[:200], flush=True)
                continue
            yield setup.row(m, "full", **fields, **figures)


def main() -> None:
    """Measure, and write the CSV after each weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default=TOKENS, help="comma-separated")
    parser.add_argument("--weights", default=WEIGHTS, help="kind:group size:dtype, comma-separated")
    parser.add_argument(
        "--most", type=int, default=4, help="ways to divide a matmul, each with several stages and spans"
    )
    parser.add_argument("--seconds", type=float, default=150, help="after which the rest is left out")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.01
    facts = device_facts(GPU)
    sizes, tokens = [int(size) for size in options.shapes.split(",")], [int(m) for m in options.tokens.split(",")]
    kinds = [weight.split(":") for weight in options.weights.split(",")]
    setups = [
        Setup(n, k, kind, int(size), getattr(torch, dtype))
        for n, k in zip(sizes[::2], sizes[1::2], strict=True)
        for kind, size, dtype in kinds
    ]
    spilling = compile_all(setups, tokens, facts, options.most)
    start = time.perf_counter()
    rows: list[dict[str, str]] = []
    for setup in setups:
        for row in measure(setup, tokens, facts, options.most, spilling):
            rows.append({**row, "machine": facts.name})
            print(*(row[column] for column in COLUMNS if column not in ("low_us", "high_us", "machine")), flush=True)
            if time.perf_counter() - start > options.seconds:
                break
        write_rows(options.csv, rows, COLUMNS)
        if time.perf_counter() - start > options.seconds:
            print(f"time is up at {setup}", flush=True)
            break
        torch.cuda.empty_cache()
    print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()

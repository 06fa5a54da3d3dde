"""The GEMMs of runtime/expand_gemm for few tokens in many shapes, beside the chosen kernel and cuBLAS.

    python benchmarks/few_tokens.py results/h200/sweeps/few-tokens-producers.csv [--seconds 60] [--formats bitmask,gqs]

Needs a Hopper GPU. float16 (or DTYPE=bfloat16), microseconds of CUDA graphs over weights that outgrow the cache. Every
output is compared with float32 before it is timed, twice: all schedules forwards, then backwards. "chosen" is the
kernel that `auto` takes. ``--once`` launches schedules once, for a profiler, without PDL.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checked import checked_error, launch_for_profiler, timed
from ec_csr_gemm import in_tiles
from every_token import DTYPE, GPU, copies_of, inputs
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F
from turns import turn

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.bench.roofline import random_weight
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.bitmask.cuda import gemm as bitmask
from semisparse.formats.bitmask.cuda.schedule import gemm_tiles
from semisparse.formats.bitmask.storage.gpu import tiling
from semisparse.formats.ec_csr.cuda import gemm as ec_csr
from semisparse.formats.ec_csr.cuda.tile_schedule import tiles_in
from semisparse.formats.gqs.cuda import gemm_wgmma as gqs
from semisparse.formats.gqs.cuda.wgmma_schedule import tiles_of as gqs_tiles
from semisparse.formats.gqs.storage.disk import code_bits, group_size
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import gemm_wgmma as vector_nm
from semisparse.formats.vector_nm.cuda.wgmma_schedule import tiles_of as vector_nm_tiles
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import Schedule, Shape, Tiles, fit, tile_m_of

LARGE, SMALL = (28672, 8192), (4096, 4096)
ALL_SCHEDULES = {"vector_nm", "gqs"}
"""The weights of which not only the chosen kernel is timed, with one and with two producer warpgroups."""

SHAPES = (LARGE, SMALL, (11008, 4096), (4096, 11008))
WEIGHTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "bitmask": ("bitmask", "32:64", {}),
    "gqs": ("gqs", "g16@50%", {"kind": "w4"}),
    "gqs-w4": ("gqs", "g128@0%", {"kind": "w4"}),
    "gqs-w2": ("gqs", "g64@0%", {"kind": "w2"}),
    "vector_nm": ("vector_nm", "16:32v32", {}),
    "ec_csr": ("ec_csr", "70%", {}),
}
KERNELS: dict[str, Any] = {"bitmask": bitmask, "gqs": gqs, "vector_nm": vector_nm, "ec_csr": ec_csr}
Weights = dict[str, list[tuple[Tensor, Packed]]]
COLUMNS = (
    *("n", "k", "m", "dtype", "weights", "kernel", *Schedule.__dataclass_fields__),
    *("us", "low_us", "high_us", "error", "megabytes", "machine"),
)


STREAMED: dict[int, tuple[Shape, ...]] = {
    16: ((4, 1, 1), (3, 1, 1), (2, 1, 2)),
    32: ((4, 1, 1), (3, 1, 1), (2, 1, 2)),
    64: ((4, 1, 1), (3, 1, 1), (2, 1, 2)),
    128: ((3, 1, 1), (2, 1, 1)),
    256: ((2, 2, 1),),
}
"""Warpgroups per CTA, CTAs per cluster and per SM to time with Stream-K, by tile_m."""

SPLIT: dict[int, tuple[Shape, ...]] = {
    16: ((1, 1, 3), (3, 1, 1), (4, 1, 1)),
    32: ((1, 1, 3), (3, 1, 1), (4, 1, 1)),
    64: ((1, 1, 3), (2, 1, 2), (3, 1, 1)),
    128: ((2, 1, 1), (3, 1, 1)),
    256: (),
}
"""The same with K split so often that the grid fills the SMs once; of smaller weights."""


def schedules(packed: Packed, m: int) -> list[Schedule]:
    """Return the schedules to time; with one and with two producer warpgroups where both are possible."""
    weight, facts, tile_m = tiles_of(packed), device_facts(GPU), tile_m_of(m)
    found = []
    for shape in (STREAMED if packed.shape == LARGE else SPLIT)[tile_m]:
        warpgroups, cluster, ctas = shape
        outputs = -(-weight.row_tiles // (4 * warpgroups)) * -(-m // tile_m)
        split = 0 if packed.shape == LARGE else min(8, weight.column_tiles, max(1, ctas * facts.sms // outputs))
        for slow_copies in (False, True):
            tiles = dataclasses.replace(weight, slow_copies=slow_copies)
            found.append(fit(tiles, facts, tile_m, warpgroups, cluster, split, ctas))
    return list(dict.fromkeys(schedule for schedule in found if schedule is not None))


def tiles_of(packed: Packed) -> Tiles:
    """Return the tiles of a weight's GEMM."""
    spec, (n, k) = packed.spec, packed.shape
    if spec.format == "bitmask":
        return gemm_tiles(tiling(spec))
    if spec.format == "ec_csr":
        return tiles_in(spec)
    if spec.format == "vector_nm":
        return vector_nm_tiles(n, k, vectors_of(spec.pattern))
    size = group_size(spec.pattern)
    return gqs_tiles(n, k, code_bits(spec.params, size), size, bool(spec.params.get("full")))


def pack(name: str, n: int, k: int) -> tuple[Tensor, Packed]:
    """Return a random weight, dense and packed."""
    form, pattern, options = WEIGHTS[name]
    dense = random_weight(parse_pattern(pattern), n, k, DTYPE, GPU)
    if form == "ec_csr":
        return dense, in_tiles(dense)
    packed = get_format(form).pack(dense, parse_pattern(pattern), **options).to(GPU)
    return packed.unpack(), packed


def products(name: str, packed: Packed, x: Tensor) -> Iterator[tuple[str, Schedule | None, Callable[..., Tensor]]]:
    """Yield kernel, schedule and matmul; the chosen kernel first."""
    form = packed.spec.format
    if form != "ec_csr":
        chosen = get_format(form).choose(problem_of(x, packed))
        yield f"chosen: {chosen.name}", None, chosen.prepare(problem_of(x, packed))
    for schedule in schedules(packed, len(x)) if name in ALL_SCHEDULES else []:
        yield "gemm", schedule, KERNELS[form].prepare(problem_of(x, packed), schedule)


def row(
    packed: Packed, m: int, name: str, kernel: str, schedule: Schedule | None, times: dict[str, str]
) -> dict[str, str]:
    """Return a CSV row."""
    (n, k), megabytes = packed.shape, f"{packed.nbytes / 1e6:.1f}"
    values: dict[str, Any] = {**(dataclasses.asdict(schedule) if schedule else {}), **times, "megabytes": megabytes}
    values |= {"n": n, "k": k, "m": m, "dtype": f"{DTYPE}"[6:], "weights": name, "kernel": kernel}
    values["machine"] = torch.cuda.get_device_name()
    return {column: str(values.get(column, "")) for column in COLUMNS}


def measure(name: str, dense: Tensor, packed: Packed, tokens: list[int]) -> Iterator[dict[str, str]]:
    """Time all schedules on one weight, forwards and then backwards, so that none always follows the same one."""
    copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
    for x, expected in inputs(tokens, dense.shape[1], dense):
        check = partial(checked_error, expected, TOLERANCE[DTYPE])
        if name == "bitmask":
            calls: list[Callable[[], Tensor]] = [partial(F.linear, x, one) for one in copies_of(dense)]
            yield row(packed, len(x), "dense", "cuBLAS", None, timed(calls, check))
        ready = list(products(name, packed, x))
        for kernel, schedule, product in (*ready, *reversed(ready)):
            try:
                times = timed([partial(product, x, one, None) for one in copies], check)
            except KernelError as error:
                times = {"error": str(error).replace(",", ";")[:80]}
            yield row(packed, len(x), name, kernel, schedule, times)


def compile_all(weights: Weights, tokens: list[int]) -> None:
    """Compile every schedule, in a thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, m in ((name, m) for m in tokens for name in weights):
            for _, packed in weights[name]:
                x = torch.empty(m, packed.shape[1], device=GPU, dtype=DTYPE)
                form = packed.spec.format
                if form != "ec_csr":
                    pool.submit(get_format(form).choose(problem_of(x, packed)).prepare, problem_of(x, packed))
                for schedule in schedules(packed, m) if name in ALL_SCHEDULES else []:
                    pool.submit(KERNELS[form].prepare, problem_of(x, packed), schedule)


def launch_once(name: str, packed: Packed, tokens: list[int]) -> None:
    """Launch the chosen kernel and all schedules once for each M, between profiler start and stop."""
    calls = []
    for m in tokens:
        x = torch.randn(m, packed.shape[1], device=GPU).to(DTYPE)
        calls += [partial(product, x, packed, None) for _, _, product in products(name, packed, x)]
    launch_for_profiler(calls)


def without_pdl() -> None:
    """Launch kernels without programmatic stream serialization."""
    from semisparse.runtime.kernel import LoadedKernel

    launch = LoadedKernel.__call__
    LoadedKernel.__call__ = lambda self, grid, threads, *, pdl=False, **arguments: launch(  # type: ignore[method-assign]
        self, grid, threads, **arguments
    )


def time_all(options: argparse.Namespace, weights: Weights, tokens: list[int]) -> None:
    """Time every weight, until the time is up."""
    start, rows = time.monotonic(), []
    for m in tokens:
        for name, index in ((name, index) for index in range(options.shapes) for name in weights):
            for found in measure(name, *weights[name][index], [m]):
                print(*found.values(), flush=True)
                rows.append(found)
            write_rows(options.csv, rows, COLUMNS)
            if time.monotonic() - start > options.seconds:
                print("time is up", flush=True)
                return


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--tokens", default="16,32,8,64,128,256", help="comma-separated, the most important first")
    parser.add_argument("--formats", default=",".join(WEIGHTS), help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--shapes", type=int, default=2, help=f"how many of {SHAPES}")
    parser.add_argument("--seconds", type=float, default=60, help="after which the rest is left out")
    parser.add_argument("--turn", type=Path, help="folder of turns.py")
    parser.add_argument("--once", action="store_true", help="launch once for each number of tokens, on the first shape")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.01
    start, tokens = time.monotonic(), [int(m) for m in options.tokens.split(",")]
    shapes = SHAPES[: 1 if options.once else options.shapes]
    weights = {name: [pack(name, n, k) for n, k in shapes] for name in options.formats.split(",")}
    if options.once:
        without_pdl()
        for name, ((_, packed),) in weights.items():
            launch_once(name, packed, tokens)
        return
    print(f"packed after {time.monotonic() - start:.0f} s", flush=True)
    compile_all(weights, tokens)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    with turn(options.turn):
        time_all(options, weights, tokens)


if __name__ == "__main__":
    main()

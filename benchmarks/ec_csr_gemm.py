"""ec_csr's kernels on mask tiles, `decode_tiles` and `gemm`, in many schedules, beside cuBLAS.

    python benchmarks/ec_csr_gemm.py results/h200/sweeps/ec_csr-tiles.csv [--seconds 60] [--sweep decode_tiles]

Needs a Hopper GPU. float16, microseconds of CUDA graphs over weights that outgrow the cache. Every output is compared
with float32 before it is timed. "chosen" marks the schedule that the kernel chooses; ``--sweep ""`` times no others.
After ``--seconds`` no more are timed. ``--once`` launches the chosen schedules once, for a profiler.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from checked import checked_error, launch_for_profiler, timed
from every_token import copies_of, inputs
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F
from turns import turn

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.bench.roofline import random_weight
from semisparse.formats import Packed, WeightSpec
from semisparse.formats.base import Params
from semisparse.formats.ec_csr.cuda import decode_tiles, gemm
from semisparse.formats.ec_csr.cuda.tile_schedule import TILE_MAX_TOKENS, WARPS_PER_SM, choose_tiles, tiles_in
from semisparse.formats.ec_csr.storage import tiles
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime import tile_decode
from semisparse.runtime.device import device_facts
from semisparse.runtime.gemm_schedule import Schedule, choose, fit, tile_m_of
from semisparse.runtime.tile_decode import TileSchedule

GPU, DTYPE = torch.device("cuda"), torch.float16
SHAPES = "28672,8192,4096,4096,11008,4096,4096,11008"
TOKENS = "16,64,8,32,128,256,1,1024"
PATTERN = "70%"
WORDS = 34
"""The largest `words_limit` of the shapes."""

STREAMED = {
    16: ((1, 1, 3), (4, 1, 1), (2, 1, 2), (3, 1, 2), (5, 1, 1), (4, 2, 1)),
    32: ((1, 1, 3), (4, 1, 1), (2, 1, 2), (4, 2, 1)),
    64: ((1, 1, 3), (4, 1, 1), (2, 1, 2), (3, 1, 1), (4, 2, 1)),
    128: ((2, 1, 1), (3, 1, 1), (3, 2, 1)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1), (2, 2, 1)),
}
"""Warpgroups per CTA, CTAs per cluster and per SM to time with Stream-K, by tile_m; of matrices of `LARGE` weights."""

SPLIT = {
    16: ((1, 1, 3), (2, 1, 2), (4, 1, 1)),
    32: ((1, 1, 3), (2, 1, 2)),
    64: ((1, 1, 3), (2, 1, 2)),
    128: ((2, 1, 1), (1, 1, 2)),
    192: ((2, 1, 1),),
    256: ((2, 1, 1),),
}
"""The same, with as many CTAs per output tile as fill the SMs once; of smaller matrices."""

DECODE = {
    1: ((1, 8, 2), (1, 16, 2), (2, 4, 2), (2, 8, 2), (4, 4, 2), (5, 4, 2), (2, 10, 2)),
    8: ((1, 8, 2), (2, 6, 2), (2, 4, 2), (3, 4, 2), (4, 4, 2), (8, 2, 2)),
    16: ((1, 8, 2), (2, 4, 2), (4, 4, 1), (4, 2, 2), (8, 2, 2)),
}
"""Row tiles, slices of K and stages to time with `decode_tiles`, by the tokens of a tile."""

LARGE = 1 << 27
COLUMNS = (
    *(
        "n",
        "k",
        "m",
        "dtype",
        "pattern",
        "kernel",
        "chosen",
        "warps_n",
        "warps_k",
        "ctas",
        *Schedule.__dataclass_fields__,
    ),
    *("us", "low_us", "high_us", "error", "bits_per_weight", "machine"),
)


def in_tiles(dense: Tensor) -> Packed:
    """Return a dense weight as mask tiles, with one limit for all shapes, so that they share builds."""
    params, tensors = tiles.pack(dense)
    params["words_limit"] = max(params["words_limit"], WORDS)
    (n, k), more = dense.shape, {"layout": "tiles", "delta_bits": 4, "panel_rows": 32, "disk_panel_rows": 32}
    every = Params({**more, "n": n, "k": k, **params})
    spec = WeightSpec("ec_csr", 1, parse_pattern(PATTERN), (n, k), dense.dtype, every)
    return Packed(spec, tensors)


def schedules(packed: Packed, m: int, swept: Sequence[str]) -> list[Schedule]:
    """Return the schedules to time, the chosen one first."""
    weight, facts, tile_m = tiles_in(packed.spec), device_facts(GPU), tile_m_of(m)
    found = [choose(m, weight, facts, gemm.RATES)]
    if "gemm" not in swept:
        return found
    large = packed.shape[0] * packed.shape[1] >= LARGE
    candidates = [(tile_m, *shape[:2], 0, shape[2]) for shape in STREAMED[tile_m] if large]
    for warpgroups, cluster, ctas in () if large else SPLIT[tile_m]:
        outputs = -(-weight.row_tiles // (4 * warpgroups)) * -(-m // tile_m)
        split = min(8, weight.column_tiles, max(1, ctas * facts.sms // outputs))
        candidates.append((tile_m, warpgroups, cluster, split, ctas))
    found += [schedule for c in candidates if (schedule := fit(weight, facts, *c)) is not None]
    return list(dict.fromkeys(found))


def decode_schedules(packed: Packed, m: int, swept: Sequence[str]) -> list[TileSchedule]:
    """Return the schedules of `decode_tiles` to time, the chosen one first."""
    if m > TILE_MAX_TOKENS:
        return []
    problem, facts = problem_of(torch.empty(m, packed.shape[1], device=GPU, dtype=DTYPE), packed), device_facts(GPU)
    found = [choose_tiles(problem, facts)]
    shapes = DECODE[found[0].tile_m] if "decode_tiles" in swept else ()
    weight = tiles_in(packed.spec)
    more = (tile_decode.fit(shape, m, weight, WARPS_PER_SM, facts) for shape in shapes)
    return list(dict.fromkeys([*found, *(schedule for schedule in more if schedule is not None)]))


def row(packed: Packed, m: int, kernel: str, **more: object) -> dict[str, str]:
    """Return a CSV row."""
    n, k = packed.shape
    values = {"n": n, "k": k, "m": m, "dtype": "float16", "pattern": PATTERN, "kernel": kernel, **more}
    values["machine"] = torch.cuda.get_device_name()
    return {column: str(values.get(column, "")) for column in COLUMNS}


def measure(dense: Tensor, packed: Packed, tokens: list[int], swept: Sequence[str]) -> Iterator[dict[str, str]]:
    """Time cuBLAS and the kernels on one weight."""
    copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
    dense_copies, bits = copies_of(dense), f"{packed.bits_per_weight:.2f}"
    for x, expected in inputs(tokens, dense.shape[1], dense):
        m, check = len(x), partial(checked_error, expected, TOLERANCE[DTYPE])
        calls: list[Callable[[], Tensor]] = [partial(F.linear, x, one) for one in dense_copies]
        yield row(packed, m, "cuBLAS", **timed(calls, check), bits_per_weight="16")
        for number, decoding in enumerate(decode_schedules(packed, m, swept)):
            product = decode_tiles.prepare(problem_of(x, packed), decoding)
            times = timed([partial(product, x, one, None) for one in copies], check)
            more = asdict(decoding) | {"bits_per_weight": bits, "chosen": int(number == 0)}
            del more["shared"]
            yield row(packed, m, "decode_tiles", **times, **more)
        for number, schedule in enumerate(schedules(packed, m, swept)):
            product = gemm.prepare(problem_of(x, packed), schedule)
            times = timed([partial(product, x, one, None) for one in copies], check)
            yield row(packed, m, "gemm", **times, **asdict(schedule), bits_per_weight=bits, chosen=int(number == 0))


def compile_all(weights: list[Packed], tokens: list[int], swept: Sequence[str]) -> None:
    """Compile every build, in a thread per core."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for m, one in ((m, one) for m in tokens for one in weights):
            problem = problem_of(torch.empty(m, one.shape[1], device=GPU, dtype=DTYPE), one)
            for schedule in schedules(one, m, swept):
                pool.submit(gemm.prepare, problem, schedule)
            for decoding in decode_schedules(one, m, swept):
                pool.submit(decode_tiles.prepare, problem, decoding)


def launch_once(packed: Packed, tokens: list[int]) -> None:
    """Launch each kernel with each number of tokens, between cudaProfilerStart and cudaProfilerStop."""
    calls = []
    for m in tokens:
        x = torch.randn(m, packed.shape[1], device=GPU).to(DTYPE)
        kernels = (decode_tiles, gemm) if m <= TILE_MAX_TOKENS else (gemm,)
        calls += [partial(kernel.prepare(problem_of(x, packed)), x, packed, None) for kernel in kernels]
    launch_for_profiler(calls)


def time_all(options: argparse.Namespace, dense: list[Tensor], packed: list[Packed], tokens: list[int]) -> None:
    """Time every shape, until the time is up."""
    start, rows = time.monotonic(), []
    for weight, one in zip(dense, packed, strict=True):
        for found in measure(weight, one, tokens, options.sweep.split(",")):
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
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default=TOKENS, help="comma-separated, the most important first")
    parser.add_argument("--seconds", type=float, default=60, help="after which the rest is left out")
    parser.add_argument("--sweep", default="gemm,decode_tiles", help="kernels to time in more than their own schedule")
    parser.add_argument("--once", action="store_true", help="launch once for each number of tokens, on the first shape")
    parser.add_argument("--turn", type=Path, help="folder of turns.py")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.015
    sizes, tokens = [int(size) for size in options.shapes.split(",")], [int(m) for m in options.tokens.split(",")]
    shapes = list(zip(sizes[::2], sizes[1::2], strict=True))[: 1 if options.once else None]
    dense = [random_weight(parse_pattern(PATTERN), n, k, DTYPE, GPU) for n, k in shapes]
    packed = [in_tiles(weight) for weight in dense]
    if options.once:
        launch_once(packed[0], tokens)
        return
    compile_all(packed, tokens, options.sweep.split(","))
    with turn(options.turn):
        time_all(options, dense, packed, tokens)


if __name__ == "__main__":
    main()

"""Two defaults against what they replaced, in turns in one process: quantised x, and vector_nm's float32 schedule.

    python benchmarks/two_defaults.py results/h200/sweeps/defaults.csv

Needs a GPU with Triton. Microseconds. `what` is:

- ``quantise``: x [M, K] in bfloat16 to 8 bits, ``new`` by the CUDA kernel, ``old`` by Triton's.
- ``layer``: a dense layer of 8 bits that quantises x first, N = K.
- ``float32``: vector_nm's ``gemm_fp32`` by the schedule that is chosen, ``old`` by the rule without `MAX_TOGETHER`, for
  the cells in which the two choose differently.

``graph`` is per call in CUDA graphs, ``eager`` the wall time of a call from Python. Each is timed forwards and
backwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checked import checked_error
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench import timing
from semisparse.bench.roofline import random_weight
from semisparse.formats import get_format
from semisparse.formats.dense.cuda import quantise
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import gemm_fp32, schedule
from semisparse.patterns import parse_pattern
from semisparse.quant import triton_symmetric
from semisparse.runtime import quantise_rows
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")
COLUMNS = ("what", "codes", "n", "k", "m", "pattern", "build", "how", "us", "low_us", "high_us", "detail", "machine")
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KERNELS = {"int8": "int8_gemm", "fp8": "scaled_mm"}
X_COPIES = 4
"""Inputs in turn. They stay in L2, as in a model, where the kernel before has written x."""

TOKENS = (1, 16, 64, 512, 2048, 8192)
FLOAT32_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FLOAT32_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192))
FLOAT32_PATTERNS = ("16:32v32", "8:32v32")
OLD_COST = 1.13
"""Cost of the third tile before `MAX_TOGETHER`."""

Row = dict[str, str]
Calls = Mapping[str, list[Any]]
"""By build, calls without arguments."""


def triton_quantise(dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return the function that the CUDA kernel replaced."""
    return partial(triton_symmetric.quantise_rows, dtype=dtype)


def timings(key: Row, calls: Calls, eager: bool) -> Iterator[Row]:
    """Time each build, forwards and backwards."""
    for build in (*calls, *reversed([*calls])):
        found = {"graph": timing.time_calls(calls[build], GPU)}
        if eager:
            found["eager"] = timing.time_eager(calls[build][0], 400)
        for how, one in found.items():
            times = {name: f"{getattr(one, name):.2f}" for name in ("us", "low_us", "high_us")}
            yield {**key, "build": build, "how": how, **times}


def quantising() -> Iterator[Row]:
    """Time the two kernels, whose bits are compared."""
    for name, dtype in CODES.items():
        for k in (4096, 11008):
            builds = {
                "new": quantise_rows.prepare(GPU, torch.bfloat16, dtype, k),
                "old": triton_quantise(dtype),
            }
            for m in TOKENS:
                xs = [torch.randn(m, k, device=GPU).bfloat16() for _ in range(X_COPIES)]
                (codes, scales), (old, old_scales) = (build(xs[0]) for build in builds.values())
                equal = torch.equal(codes.view(torch.int8), old.view(torch.int8)) and torch.equal(scales, old_scales)
                key = {"what": "quantise", "codes": name, "k": str(k), "m": str(m), "detail": f"equal bits: {equal}"}
                calls = {build: [partial(call, x) for x in xs] for build, call in builds.items()}
                yield from timings(key, calls, eager=m in (1, 64, 512))


def layers() -> Iterator[Row]:
    """Time whole layers."""
    size, form = 4096, get_format("dense")
    weight, new_way = random_weight(parse_pattern("0%"), size, size, torch.bfloat16, GPU), quantise.prepare
    for name, dtype in CODES.items():
        packed = form.pack(weight, parse_pattern("0%"), kind=name).to(GPU)
        kernel = next(kernel for kernel in form.kernels if kernel.name == KERNELS[name])
        copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
        for m in (1, 64, 512, 2048):
            x, builds = torch.randn(m, size, device=GPU).bfloat16(), {}
            for build in ("new", "old"):
                quantise.prepare = new_way if build == "new" else lambda problem, dtype=dtype: triton_quantise(dtype)  # type: ignore[misc]
                builds[build] = kernel.prepare(problem_of(x, packed))
            quantise.prepare = new_way
            outputs = [build(x, packed, None) for build in builds.values()]
            key = {"what": "layer", "codes": name, "n": str(size), "k": str(size), "m": str(m)}
            key["detail"] = f"equal bits: {torch.equal(*outputs)}"
            calls = {build: [partial(call, x, one, None) for one in copies] for build, call in builds.items()}
            yield from timings(key, calls, eager=True)


def old_schedule(pattern: str, m: int, n: int) -> schedule.GemmSchedule | None:
    """Return what the rule before `MAX_TOGETHER` chooses."""
    facts, tiles, together = device_facts(GPU), schedule.TILES[4], schedule.MAX_TOGETHER
    old = tuple(tile if tile.cost != 1.16 else schedule.Tile(64, 128, 8, 4, OLD_COST, 32) for tile in tiles)
    try:
        schedule.MAX_TOGETHER, schedule.TILES[4] = 0, old
        choose = schedule.choose_gemm.__wrapped__
        return choose(parse_pattern(pattern), m, n, torch.float32, facts.sms, facts.shared_per_cta)
    finally:
        schedule.MAX_TOGETHER, schedule.TILES[4] = together, tiles


def float32() -> Iterator[Row]:
    """Time vector_nm's float32 GEMM where the two rules differ."""
    facts = device_facts(GPU)
    for text in FLOAT32_PATTERNS:
        for n, k in FLOAT32_SHAPES:
            pattern, packed = parse_pattern(text), None
            for m in FLOAT32_TOKENS:
                new = schedule.choose_gemm(pattern, m, n, torch.float32, facts.sms, facts.shared_per_cta)
                old = old_schedule(text, m, n)
                if new is None or old is None or (new.tile.m == old.tile.m and new.tile.n == old.tile.n):
                    continue
                if packed is None:
                    dense = random_weight(pattern, n, k, torch.float32, GPU)
                    packed = get_format("vector_nm").pack(dense, pattern).to(GPU)
                    copies = timing.rotating_copies(packed, facts.cache_bytes)
                x = torch.randn(m, k, device=GPU)
                calls: dict[str, list[Any]] = {}
                for build, one in (("new", new), ("old", old)):
                    product = gemm_fp32.prepare(problem_of(x, packed), one)
                    checked_error(F.linear(x[-64:].double(), dense.double()).float(), 1e-5, product(x, packed, None))
                    calls[build] = [partial(product, x, copy, None) for copy in copies]
                key = {"what": "float32", "n": str(n), "k": str(k), "m": str(m), "pattern": text}
                key["detail"] = f"tiles {new.tile.m}x{new.tile.n} / {old.tile.m}x{old.tile.n}"
                yield from timings(key, calls, eager=False)


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.02
    rows: list[Row] = []
    for part in (layers, quantising, float32):
        for found in part():
            row = {column: found.get(column, "") for column in COLUMNS} | {"machine": torch.cuda.get_device_name()}
            rows.append(row)
            write_rows(options.csv, rows, COLUMNS)
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()

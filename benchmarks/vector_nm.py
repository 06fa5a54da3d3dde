"""Matmuls of format vector_nm on a GPU beside cuBLAS in the same run: one CSV row per measurement.

    python benchmarks/vector_nm.py products results/h200/nm-products.csv [--dtype float32] [--tokens 512,2048,4096]
    python benchmarks/vector_nm.py ablation results/h200/nm-ablation.csv
    python benchmarks/vector_nm.py decode results/h200/nm-decode.csv

`products` times whole matmuls, the transposition of x included: the tiled GEMM that would be chosen, `gemm_sparse` on
Hopper, and cuBLAS after unpacking. `ablation` is the paper's: V1 tiles of whole windows, V2 with only the columns that
are kept, V3 with more stages in flight. Every output is compared with float64 before it is timed. cuBLAS does not use
TF32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench.roofline import random_weight
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.kernel import Problem, Product, bucket_of
from semisparse.formats.product import problem_of
from semisparse.formats.vector_nm.cuda import decode, decode_tensor, gemm, gemm_fp32, gemm_sparse, unpack
from semisparse.formats.vector_nm.cuda.decode_schedule import MAX_M
from semisparse.formats.vector_nm.cuda.schedule import TILES, GemmSchedule, choose_gemm
from semisparse.formats.vector_nm.storage.disk import vectors_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")
PATTERNS = "32:32v32,16:32v32,12:32v32,8:32v32,4:32v32"
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008))
DECODED = ((4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192))
CHECKED_ROWS = 48
CALLS = 8
"""Least calls per CUDA graph: launching a graph takes as long as a short GEMM."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
COLUMNS = (
    "what",
    "dtype",
    "m",
    "n",
    "k",
    "pattern",
    "kernel",
    "us",
    "dense_us",
    "speedup",
    "error",
    "dense_error",
)


class Layer:
    """One problem size and dtype, with the time of cuBLAS.

    Args:
        m, n, k: y[M, N] = x[M, K] @ w[N, K].T.
        dtype: of all three.
    """

    def __init__(self, what: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.x = torch.randn(m, k, device=GPU).to(dtype)
        weights = [torch.randn(n, k, device=GPU).to(dtype) for _ in range(2 if m > 16 else 4)]
        self.head = (what, str(dtype).removeprefix("torch."), m, n, k)
        self.dense_us = time_calls(often([partial(F.linear, self.x, w) for w in weights]), GPU).us
        self.dense_error = self.error(F.linear(self.x, weights[0]), weights[0])

    def error(self, y: Tensor, weight: Tensor) -> float:
        """Return the relative error of some rows of y against float64."""
        rows = torch.linspace(0, len(y) - 1, min(len(y), CHECKED_ROWS), device=GPU).long()
        expected = self.x[rows].double() @ weight.double().T
        return ((y[rows].double() - expected).norm() / expected.norm()).item()

    def pack(self, pattern: str) -> list[Packed]:
        """Return copies of a random packed weight."""
        _, _, m, n, k = self.head
        weight = random_weight(parse_pattern(pattern), n, k, self.x.dtype, GPU)
        packed = get_format("vector_nm").pack(weight, pattern).to(GPU)
        return rotating_copies(packed, device_facts(GPU).cache_bytes if m <= 16 else 1)

    def measure(self, kernel: str, prepare: Callable[[Problem], Product], copies: list[Packed]) -> dict[str, str]:
        """Verify and time a kernel; return a row of the CSV."""
        product = prepare(problem_of(self.x, copies[0]))
        error = self.error(product(self.x, copies[0], None), copies[0].unpack())
        if not error <= TOLERANCE[self.x.dtype]:
            raise KernelError(f"{kernel} is wrong at {self.head}, {copies[0].pattern}: relative error {error:.3g}")
        us = time_calls(often([partial(product, self.x, packed, None) for packed in copies]), GPU).us
        figures = (f"{us:.2f}", f"{self.dense_us:.2f}", f"{self.dense_us / us:.3f}", f"{error:.2e}")
        values = (*self.head, copies[0].pattern, kernel, *figures, f"{self.dense_error:.2e}")
        return dict(zip(COLUMNS, map(str, values), strict=True))


def often(calls: list[Callable[[], Tensor]]) -> list[Callable[[], Tensor]]:
    """Repeat calls, in order, until there are at least `CALLS`."""
    return calls * -(-CALLS // len(calls))


def label(schedule: GemmSchedule) -> str:
    """Name a schedule."""
    way = "packed" if schedule.packed else "whole"
    return f"{schedule.tile.m}x{schedule.tile.n} {way} {schedule.slots}/{schedule.columns} x{schedule.stages}"


def products(dtype: torch.dtype, tokens: list[int], patterns: list[str]) -> Iterator[dict[str, str]]:
    """Measure the tiled GEMM that would be chosen and, where it may be slower, cuBLAS after unpacking."""
    facts = device_facts(GPU)
    tiled = gemm_fp32 if dtype == torch.float32 else gemm
    for n, k in SHAPES:
        for m in tokens:
            layer = Layer("product", m, n, k, dtype)
            for pattern in patterns:
                copies = layer.pack(pattern)
                vectors = vectors_of(copies[0].pattern)
                chosen = choose_gemm(vectors, bucket_of(m), n, dtype, facts.sms, facts.shared_per_cta)
                if chosen:
                    yield layer.measure(label(chosen), tiled.prepare, copies)
                if gemm_sparse.refusal(problem_of(layer.x, copies[0])) is None:
                    yield layer.measure("gemm_sparse", gemm_sparse.prepare, copies)
                if dtype != torch.float32 or not chosen:
                    yield layer.measure("unpack", unpack.prepare, copies)


def ablation(patterns: list[str]) -> Iterator[dict[str, str]]:
    """Measure the paper's three steps with one tile, in float32."""
    layer = Layer("ablation", 2048, 4096, 4096, torch.float32)
    for pattern in patterns:
        copies = layer.pack(pattern)
        length = vectors_of(copies[0].pattern).length
        for version, packed, stages in (("V1", False, 1), ("V2", True, 1), ("V3", True, 3), ("V3 whole", False, 3)):
            keep, window = vectors_of(copies[0].pattern).keep, vectors_of(copies[0].pattern).window
            slots = keep if not packed else 8
            schedule = GemmSchedule(TILES[4][1], length, slots, window, stages, packed, torch.float32)
            prepare = partial(gemm_fp32.prepare, schedule=schedule)
            yield layer.measure(f"{version}: {label(schedule)}", prepare, copies)


def decoding(dtype: torch.dtype, tokens: list[int]) -> Iterator[dict[str, str]]:
    """Measure few tokens at 50 %, with programmatic dependent launches."""
    for n, k in DECODED:
        for m in tokens:
            layer = Layer("decode", m, n, k, dtype)
            copies = layer.pack("16:32v32")
            for name, prepare in (("decode_tensor", decode_tensor.prepare), ("decode", decode.prepare)):
                yield layer.measure(name, prepare, copies)


def main() -> None:
    """Measure, and write each row when it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "ablation", "decode"])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--tokens", default="1,2,4,8,16,512,2048,4096")
    parser.add_argument("--patterns", default=PATTERNS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype, tokens = getattr(torch, options.dtype), [int(m) for m in options.tokens.split(",")]
    patterns = options.patterns.split(",")
    found = {
        "products": lambda: products(dtype, [m for m in tokens if m > MAX_M], patterns),
        "ablation": lambda: ablation(patterns),
        "decode": lambda: decoding(torch.float16, [m for m in tokens if m <= MAX_M]),
    }[options.what]
    rows: list[dict[str, str]] = []
    for row in found():
        rows.append(row)
        print(*row.values(), flush=True)
        write_rows(options.csv, rows, COLUMNS)


if __name__ == "__main__":
    main()

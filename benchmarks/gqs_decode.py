"""One token through format gqs with several schedules, beside cuBLAS and torch's int4 matmul.

    python benchmarks/gqs_decode.py results/h200/gqs-decode.csv [--dtype bfloat16] [--shapes 4096,4096,11008,4096]

Needs a GPU. Times are of CUDA graphs over weights that outgrow the cache; every output is compared with float64 before
it is timed. The rows' magnitudes differ by a tenth (standard deviation), so that one threshold for the matrix leaves
some rows with a sixth of their groups and others with five sixths. With "Stream-K" a CTA computes several row tiles,
whose k-tiles its warps share evenly; with "a block" each row tile has its own CTA; `W4S50` alone is the chosen
schedule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench.kernels import ROUNDED_INPUT_TOLERANCE, TOLERANCE
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.gqs.cuda import schedule
from semisparse.formats.kernel import Product
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = "4096,4096,11008,4096,4096,11008,28672,8192"
GPU = torch.device("cuda")
COLUMNS = ("n", "k", "dtype", "way", "us", "low_us", "high_us", "bytes", "bits_per_weight", "error", "machine")


class Way(NamedTuple):
    """A format's pattern, kind and kernel; for gqs, the row tiles per SM up to which each has a CTA."""

    format: str
    pattern: str
    kind: str | None = None
    kernel: str | None = None
    tiles_per_sm: int = schedule.TILES_PER_SM


ALWAYS, NEVER = 1 << 30, 0

WAYS = {
    "cuBLAS": Way("dense", "0%", None, "blas"),
    "torch int4, groups of 32": Way("dense", "0%", "int4", "int4pack_mm"),
    "W4S50": Way("gqs", "g16@50%", "w4"),
    "W4S50, a block for each tile": Way("gqs", "g16@50%", "w4", tiles_per_sm=ALWAYS),
    "W4S50, Stream-K": Way("gqs", "g16@50%", "w4", tiles_per_sm=NEVER),
    "W4A8S50": Way("gqs", "g16@50%", "w4a8"),
    "W4S20": Way("gqs", "g16@20%", "w4"),
    "W4": Way("gqs", "g16@0%", "w4"),
    "W8S50": Way("gqs", "g16@50%", "w8"),
}


def measure(n: int, k: int, dtype: torch.dtype) -> Iterator[dict[str, str]]:
    """Time one token in every way that takes the dtype."""
    facts = device_facts(GPU)
    generator = torch.Generator(GPU).manual_seed(n * k)
    drawn = torch.randn(n, k, generator=generator, device=GPU)
    drawn *= (torch.randn(n, 1, generator=generator, device=GPU) / 10).exp() / k**0.5
    x = torch.randn(1, k, generator=generator, device=GPU).to(dtype)
    for name, way in WAYS.items():
        packed = pack(drawn, dtype, way)
        product = prepare(x, packed, way)
        if product is None:  # torch's int4 matmul takes bfloat16 only
            continue
        copies = rotating_copies(packed, facts.cache_bytes)
        error = error_of(product, x, packed)
        if not error <= (ROUNDED_INPUT_TOLERANCE["tensor int8"] if way.kind == "w4a8" else TOLERANCE[dtype]):
            raise KernelError(f"{name} is wrong at {n} x {k}: relative error {error:.3g}; it was not timed")
        timing = time_calls([partial(product, x, copy, None) for copy in copies], GPU)
        times = (f"{us:.2f}" for us in (timing.us, timing.low_us, timing.high_us))
        sizes = (packed.nbytes, f"{packed.bits_per_weight:.2f}", f"{error:.1e}")
        values = (n, k, str(dtype).removeprefix("torch."), name, *times, *sizes, facts.name)
        yield dict(zip(COLUMNS, map(str, values), strict=True))


def pack(drawn: Tensor, dtype: torch.dtype, way: Way) -> Packed:
    """Drop what the way's pattern drops, and store the rest."""
    pattern = parse_pattern(way.pattern)
    weight = (drawn * pattern.mask(drawn.abs())).to(dtype)
    return get_format(way.format).pack(weight, pattern, **({} if way.kind is None else {"kind": way.kind})).to(GPU)


def prepare(x: Tensor, packed: Packed, way: Way) -> Product | None:
    """Prepare the way's kernel, or the first that supports the problem; None if there is none."""
    problem = problem_of(x, packed)
    schedule.TILES_PER_SM = way.tiles_per_sm
    for kernel in get_format(way.format).kernels:
        if way.kernel in (None, kernel.name) and kernel.refusal(problem) is None:
            return kernel.prepare(problem)
    return None


def error_of(product: Product, x: Tensor, packed: Packed) -> float:
    """Return the relative error against float64."""
    expected = F.linear(x.double(), packed.unpack().double())
    return ((product(x, packed, None).double() - expected).norm() / expected.norm()).item()


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--dtype", default="float16,bfloat16", help="comma-separated")
    options = parser.parse_args()
    sizes = [int(size) for size in options.shapes.split(",")]
    rows: list[dict[str, str]] = []
    for dtype in options.dtype.split(","):
        for n, k in zip(sizes[::2], sizes[1::2], strict=True):
            for row in measure(n, k, getattr(torch, dtype)):
                rows.append(row)
                write_rows(options.csv, rows, COLUMNS)
                print(*(row[column] for column in COLUMNS[:7]), flush=True)


if __name__ == "__main__":
    main()

"""bitmask in 8 and 4 bits beside 16 bits and cuBLAS: decode to 16 tokens, then gemm, as `auto` schedules them.

    python benchmarks/bitmask_codes_speed.py results/h200/bitmask-codes.csv [--dtype bfloat16]

Needs a Hopper GPU: CUDA graphs over weights that outgrow the cache, every output compared before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from rows import write_rows
from torch.nn import functional as F

from semisparse.bench.roofline import random_weight
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.formats import get_format
from semisparse.formats.bitmask.cuda import decode, gemm
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (28672, 8192))

COLUMNS = ("n", "k", "m", "dtype", "way", "us", "low_us", "error", "bits_per_weight", "machine")

TOKENS = {1: decode, 8: decode, 16: decode, 32: gemm, 64: gemm, 128: gemm, 256: gemm}

WAYS = {"16 bits": "none", "w8": "w8", "w4": "w4"}

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}

GPU = torch.device("cuda")


def measure(n: int, k: int, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """Yield a row per way and number of tokens.

    Raises:
        SystemExit: an output is wrong.
    """
    cache = device_facts(GPU).cache_bytes
    weight = random_weight(parse_pattern("32:64"), n, k, dtype, GPU)
    dense = [copy.tensors["values"] for copy in rotating_copies(get_format("dense").pack(weight, "0%"), cache)]
    xs = {m: torch.randn(m, k, device=GPU).to(dtype) for m in TOKENS}
    common = {"n": n, "k": k, "dtype": str(dtype).removeprefix("torch."), "machine": torch.cuda.get_device_name()}
    cublas = {m: time_calls([partial(F.linear, x, w) for w in dense], GPU) for m, x in xs.items()}
    for m, time in cublas.items():
        yield common | {"m": m, "way": "cuBLAS", "us": time.us, "low_us": time.low_us, "bits_per_weight": 16}
    for way, kind in WAYS.items():
        packed = rotating_copies(get_format("bitmask").pack(weight, "32:64", kind=kind).to(GPU), cache)
        unpacked = packed[0].unpack().double()
        for m, x in xs.items():
            product, expected = TOKENS[m].prepare(problem_of(x, packed[0])), x.double() @ unpacked.T
            error = float((product(x, packed[0], None) - expected).norm() / expected.norm())
            if not error <= TOLERANCE[dtype]:
                raise SystemExit(f"{n} x {k}, {m} tokens, {way}: the output is wrong, relative error {error:.1e}")
            time = time_calls([partial(product, x, one, None) for one in packed], GPU)
            figures = {"us": time.us, "low_us": time.low_us, "error": error}
            yield common | {"m": m, "way": way, "bits_per_weight": packed[0].bits_per_weight} | figures


def main() -> None:
    """Read the arguments, measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    options = parser.parse_args()
    rows = [row for n, k in SHAPES for row in measure(n, k, getattr(torch, options.dtype))]
    write_rows(options.out, [{name: str(value) for name, value in row.items()} for row in rows], COLUMNS)


if __name__ == "__main__":
    main()

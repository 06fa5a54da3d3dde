"""Few tokens on a GPU: bitmask's decode kernel, in a chain of overlapping launches (PDL), beside cuBLAS.

    python benchmarks/decode.py [--tokens 1,8,16] [--dtype float16] [--pattern 32:64] [--shapes 4096,4096,11008,4096]

Microseconds per call, CUDA graphs over weights that outgrow the cache four times.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch.nn import functional as F

from semisparse.bench.roofline import random_weight
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.formats import get_format
from semisparse.formats.bitmask.cuda import decode
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = "4096,4096,11008,4096,4096,11008,28672,8192,8960,1536,1536,1536"

GPU = torch.device("cuda")


def measure(n: int, k: int, tokens: list[int], dtype: torch.dtype, pattern: str) -> None:
    """Print a line per number of tokens."""
    cache = device_facts(GPU).cache_bytes
    weight = random_weight(parse_pattern(pattern), n, k, dtype, GPU)
    packed = rotating_copies(get_format("bitmask").pack(weight, pattern).to(GPU), cache)
    dense = [packed.tensors["values"] for packed in rotating_copies(get_format("dense").pack(weight, "0%"), cache)]
    for m in tokens:
        x = torch.randn(m, k, device=GPU).to(dtype)
        problem = problem_of(x, packed[0])
        product = decode.prepare(problem)
        expected = x.double() @ weight.double().T
        error = (product(x, packed[0], None) - expected).norm() / expected.norm()
        times = [
            time_calls([partial(F.linear, x, w) for w in dense], GPU),
            time_calls([partial(product, x, p, None) for p in packed], GPU),
        ]
        cells = [f"{time.us:8.2f}" for time in times]
        print(f"{n:6d} x {k:<6d} {m:3d} {' '.join(cells)}   error {error:.1e}", flush=True)


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,8,16")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--pattern", default="32:64")
    parser.add_argument("--shapes", default=SHAPES)
    options = parser.parse_args()
    sizes = [int(size) for size in options.shapes.split(",")]
    print(" N x K            M   cuBLAS   decode")
    for n, k in zip(sizes[::2], sizes[1::2], strict=True):
        measure(n, k, [int(m) for m in options.tokens.split(",")], getattr(torch, options.dtype), options.pattern)


if __name__ == "__main__":
    main()

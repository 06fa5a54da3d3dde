"""Times of format ec_csr: decode beside cuBLAS and cuSPARSE, the paper's ablation, and its block extraction.

    python benchmarks/ec_csr_speed.py decode results/h200/ec_csr-decode.csv [--dtype float32 --zeros 70]
    python benchmarks/ec_csr_speed.py ablation results/h200/ec_csr-ablation.csv
    python benchmarks/ec_csr_speed.py extraction results/h200/ec_csr-extraction.csv [--device cpu --shapes 4096,4096]

`decode` and `ablation` need a GPU. They time one token in CUDA graphs over weights that exceed the cache. Every output
is compared with float64 before it is timed. `ablation` is the paper's section 8.3, in the layout ``paper``:
delta-encoded columns only, then with blocks of rows that share columns, then with long blocks clipped. `extraction`
measures seconds, and writes a digest that is the same on every device.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cusparse
import torch
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F

from semisparse.bench.roofline import random_weight
from semisparse.bench.timing import rotating_copies, time_calls
from semisparse.errors import KernelError
from semisparse.formats import Packed, get_format
from semisparse.formats.ec_csr.paper.extract import Blocks, extract
from semisparse.formats.product import problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

SHAPES = dict.fromkeys(("decode", "ablation"), "4096,4096,11008,4096,4096,11008,28672,8192")
SHAPES["extraction"] = "4096,4096,28672,8192"
MULTIPLE, GRANULARITY, REACH = 128, 8, 255
NEVER = 1 << 20
"""Loads per lane that no block reaches, so that no block is clipped."""

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "decode": {"banks 4": {"delta_bits": 4}, "banks 8": {"delta_bits": 8}},
    "ablation": {
        "columns as deltas": {"layout": "paper", "delta_bits": 8, "granularity": 1, "clip": NEVER},
        "+ extraction": {"layout": "paper", "delta_bits": 8, "granularity": GRANULARITY, "clip": NEVER},
        "+ clipping": {"layout": "paper", "delta_bits": 8, "granularity": GRANULARITY},
        "clipping alone": {"layout": "paper", "delta_bits": 8, "granularity": 1},
    },
}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}
TIMED = ("what", "n", "k", "zeros", "dtype", "way", "us", "low_us", "high_us", "bytes", "error", "machine")
EXTRACTION = ("n", "k", "zeros", "device", "seconds", "shared2", "shared4", "shared8", "digest", "machine")

Row = dict[str, str]


def decode(
    what: str, n: int, k: int, zeros: str, dtype: torch.dtype, ways: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
    """Time one token in every way, after cuBLAS and cuSPARSE on the same weight."""
    device = torch.device("cuda")
    facts = device_facts(device)
    weight = random_weight(parse_pattern(f"{zeros}%"), n, k, dtype, device)
    x = torch.randn(1, k, device=device).to(dtype)
    expected = x.double() @ weight.double().T

    def row(way: str, calls: list[Callable[[], Tensor]], size: int) -> Row:
        error = ((calls[0]().view(1, n).double() - expected).norm() / expected.norm()).item()
        if not error <= TOLERANCE[dtype]:
            raise KernelError(f"{way} is wrong at {n} x {k}, {zeros} %: relative error {error:.3g}")
        timing = time_calls(calls, device)
        times = (f"{us:.2f}" for us in (timing.us, timing.low_us, timing.high_us))
        name = str(dtype).removeprefix("torch.")
        values = (what, n, k, zeros, name, way, *times, size, f"{error:.1e}", facts.name)
        return dict(zip(TIMED, map(str, values), strict=True))

    size = weight.numel() * weight.element_size()
    copies = range(max(2, -(-4 * facts.cache_bytes // size)))
    yield row("cuBLAS", [partial(F.linear, x, w) for w in (weight.clone() for _ in copies)], size)
    compressed = [weight.to_sparse_csr() for _ in copies]
    size = sum(
        t.numel() * t.element_size()
        for t in (compressed[0].values(), compressed[0].col_indices(), compressed[0].crow_indices())
    )
    yield row("cuSPARSE", [partial(torch.mv, matrix, x[0]) for matrix in compressed], size)
    del compressed
    for algorithm in cusparse.ALGORITHMS:
        calls, size = cusparse.products(weight, x[0], len(copies), algorithm)
        yield row(f"cuSPARSE {algorithm}, 32-bit columns, preprocessed", calls, size)
    form = get_format("ec_csr")
    for way, options in ways.items():
        packed = form.pack(weight, f"{zeros}%", **options).to(device)
        problem = problem_of(x, packed)
        product = form.choose(problem).prepare(problem)
        rotated: list[Packed] = rotating_copies(packed, facts.cache_bytes)
        yield row(way, [partial(product, x, each, None) for each in rotated], packed.nbytes)


def extraction(n: int, k: int, zeros: str, device: torch.device) -> Row:
    """Time block extraction on a random mask, which is the same on every device."""
    generator = torch.Generator().manual_seed(n * k)
    stored = (torch.rand(n, k, generator=generator) >= float(zeros) / 100).to(device)
    if device.type == "cuda":
        extract(stored[:64], MULTIPLE, GRANULARITY, REACH)
        torch.cuda.synchronize()
    start = time.perf_counter()
    sets = extract(stored, MULTIPLE, GRANULARITY, REACH)
    total = int(stored.count_nonzero())
    seconds = time.perf_counter() - start
    fractions = {blocks.granularity: blocks.weights / total for blocks in sets}
    figures = (f"{fractions.get(rows, 0.0):.4f}" for rows in (2, 4, 8))
    values = (n, k, zeros, device.type, f"{seconds:.2f}", *figures, digest(sets), device_facts(device).name)
    return dict(zip(EXTRACTION, map(str, values), strict=True))


def digest(sets: list[Blocks]) -> str:
    """Return a digest of the rows and columns of all blocks, in order."""
    sha = hashlib.sha256()
    for blocks in sets:
        sha.update(blocks.rows.cpu().numpy().tobytes())
        sha.update(blocks.columns.cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WAYS, "extraction"])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", help="N,K pairs, comma-separated")
    parser.add_argument("--zeros", help="percent, comma-separated; by default 70,90, or 70 for ablation and extraction")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--device", default="cuda", help="the device of the extraction")
    options = parser.parse_args()
    sizes = [int(size) for size in (options.shapes or SHAPES[options.what]).split(",")]
    zeros = (options.zeros or ("70,90" if options.what == "decode" else "70")).split(",")
    rows: list[Row] = []
    for n, k in zip(sizes[::2], sizes[1::2], strict=True):
        for percent in zeros:
            if options.what == "extraction":
                measured: Iterator[Row] = iter([extraction(n, k, percent, torch.device(options.device))])
            else:
                measured = decode(options.what, n, k, percent, getattr(torch, options.dtype), WAYS[options.what])
            for row in measured:
                rows.append(row)
                print(*row.values(), flush=True)
                write_rows(options.csv, rows, EXTRACTION if options.what == "extraction" else TIMED)


if __name__ == "__main__":
    main()

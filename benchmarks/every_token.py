"""1 to 1,024 tokens through every format's chosen kernel, cuBLAS and int4 of humming-kernels (PyPI), in one call.

    python benchmarks/every_token.py results/h200/every-token.csv [--shapes 28672,8192,4096,4096] [--seconds 120]

Needs a GPU. float16 (with DTYPE=bfloat16 in the environment that), microseconds of CUDA graphs over weights that
outgrow the cache. Every output is compared with float32 before it is timed; humming's with the weight before rounding
to 4 bits, whose error is 0.1. Without the package humming has no rows. After ``--seconds`` no more are timed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checked import checked_error, timed
from rows import write_rows
from torch import Tensor
from torch.nn import functional as F
from turns import turn

from semisparse.bench import timing
from semisparse.bench.kernels import TOLERANCE
from semisparse.bench.roofline import Candidate, random_weight
from semisparse.formats import Packed, get_format
from semisparse.formats.kernel import in_parallel
from semisparse.formats.product import prepare_product, problem_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

GPU, DTYPE = torch.device("cuda"), getattr(torch, os.environ.get("DTYPE", "float16"))
SHAPES = "28672,8192,4096,4096,11008,4096,4096,11008"
TOKENS = "1,8,16,32,64,128,256,1024"
WEIGHTS = (
    Candidate("gqs", "g16@50%", {"kind": "w4"}),
    Candidate("gqs", "g128@0%", {"kind": "w4"}),
    Candidate("gqs", "g64@0%", {"kind": "w2"}),
    Candidate("bitmask", "32:64"),
    Candidate("vector_nm", "16:32v32"),
    Candidate("ec_csr", "70%"),
)
COLUMNS = ("n", "k", "m", "dtype", "weights", "kernel", "us", "low_us", "high_us", "error", "megabytes", "machine")
HUMMING_ERROR = 0.2
"""Most relative error of 4-bit groups of 128."""


def compile_all(weights: Sequence[Packed], tokens: Sequence[int]) -> None:
    """Compile every chosen kernel, in a thread per core."""
    in_parallel(partial(prepare_product, packed, m, DTYPE) for packed in weights for m in tokens)


def row(n: int, k: int, m: int, weights: str, kernel: str, megabytes: float, times: dict[str, str]) -> dict[str, str]:
    """Return a CSV row."""
    values = {"n": n, "k": k, "m": m, "dtype": f"{DTYPE}"[6:], "weights": weights, "kernel": kernel, **times}
    values |= {"megabytes": f"{megabytes:.1f}", "machine": torch.cuda.get_device_name()}
    return {column: str(values[column]) for column in COLUMNS}


def inputs(tokens: Sequence[int], k: int, dense: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x [M, K] and the expected last rows of y, for each M."""
    for m in tokens:
        x = torch.randn(m, k, device=GPU).to(DTYPE)
        yield x, F.linear(x[-64:].float(), dense.float())


def copies_of(dense: Tensor) -> list[Tensor]:
    """Return a dense weight and copies of it that outgrow the cache."""
    more = max(1, timing.CACHES * device_facts(GPU).cache_bytes // dense.nbytes)
    return [dense, *(dense.clone() for _ in range(more))]


def measure_format(candidate: Candidate, packed: Packed, tokens: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time a format's chosen kernels."""
    (n, k), form = packed.shape, get_format(candidate.format)
    copies = timing.rotating_copies(packed, device_facts(GPU).cache_bytes)
    for x, expected in inputs(tokens, k, packed.unpack()):
        kernel = form.choose(problem_of(x, packed))
        product = kernel.prepare(problem_of(x, packed))
        check = partial(checked_error, expected, TOLERANCE[DTYPE])
        times = timed([partial(product, x, one, None) for one in copies], check)
        yield row(n, k, len(x), candidate.label, kernel.name, packed.nbytes / 1e6, times)


def measure_dense(dense: Tensor, tokens: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time cuBLAS."""
    copies = copies_of(dense)
    for x, expected in inputs(tokens, dense.shape[1], dense):
        check = partial(checked_error, expected, TOLERANCE[DTYPE])
        times = timed([partial(F.linear, x, one) for one in copies], check)
        yield row(*dense.shape, len(x), "dense", "cuBLAS", dense.nbytes / 1e6, times)


def humming_layer(dense: Tensor) -> Any:
    """Return humming's layer with int4 weights in groups of 128."""
    from humming.layer import HummingLayer

    n, k = dense.shape
    config = {"dtype": "int4", "group_size": 128}
    layer: Any = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=DTYPE).to(GPU)
    layer.load_from_unquantized(dense)
    layer.transform()
    return layer


def measure_humming(dense: Tensor, tokens: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time humming's layer."""
    (n, k), layer = dense.shape, humming_layer(dense)
    held = sum(parameter.nbytes for parameter in layer.parameters())
    more = max(1, timing.CACHES * device_facts(GPU).cache_bytes // held)
    copies = [layer, *(copy.deepcopy(layer) for _ in range(more))]
    for x, expected in inputs(tokens, k, dense):
        error = checked_error(expected, HUMMING_ERROR, layer(x))
        found = timing.time_calls([partial(one, x) for one in copies], GPU)
        times = {name: f"{getattr(found, name):.2f}" for name in ("us", "low_us", "high_us")}
        yield row(n, k, len(x), "dense int4", "humming", held / 1e6, {**times, "error": f"{error:.1e}"})


def pack_all(n: int, k: int) -> list[Packed]:
    """Return a random weight of a shape in every format."""
    packed = []
    for candidate in WEIGHTS:
        pattern = parse_pattern(candidate.pattern)
        weight = random_weight(pattern, n, k, DTYPE, GPU)
        packed.append(get_format(candidate.format).pack(weight, pattern, **candidate.options).to(GPU))
    return packed


def measure(dense: Tensor, packed: Sequence[Packed], tokens: Sequence[int]) -> Iterator[dict[str, str]]:
    """Time a shape."""
    yield from measure_dense(dense, tokens)
    for candidate, one in zip(WEIGHTS, packed, strict=True):
        yield from measure_format(candidate, one, tokens)
    if importlib.util.find_spec("humming"):
        yield from measure_humming(dense, tokens)


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--shapes", default=SHAPES, help="N,K pairs, comma-separated")
    parser.add_argument("--tokens", default=TOKENS, help="comma-separated")
    parser.add_argument("--seconds", type=float, default=120, help="after which the rest is left out")
    parser.add_argument("--turn", type=Path, help="folder of turns.py")
    options = parser.parse_args()
    timing.GPU_SECONDS = 0.02
    sizes, tokens = [int(size) for size in options.shapes.split(",")], [int(m) for m in options.tokens.split(",")]
    rows: list[dict[str, str]] = []
    shapes = list(zip(sizes[::2], sizes[1::2], strict=True))
    packed = {shape: pack_all(*shape) for shape in shapes}
    compile_all([one for of_shape in packed.values() for one in of_shape], tokens)
    dense = {shape: random_weight(parse_pattern("0%"), *shape, DTYPE, GPU) for shape in shapes}
    if importlib.util.find_spec("humming"):
        for one in dense.values():
            layer = humming_layer(one)
            for x, _ in inputs(tokens, one.shape[1], one):
                layer(x)  # compiles
    print("prepared", flush=True)
    with turn(options.turn):
        start = time.perf_counter()
        for shape in shapes:
            for one in measure(dense[shape], packed[shape], tokens):
                rows.append(one)
                write_rows(options.csv, rows, COLUMNS)
                print(*(one[column] for column in ("n", "k", "m", "weights", "kernel", "us", "error")), flush=True)
                if time.perf_counter() - start > options.seconds:
                    print("time is up", flush=True)
                    return


if __name__ == "__main__":
    main()

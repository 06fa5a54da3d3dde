"""Host time of an eager call of a sparse layer, beside ``nn.Linear``.

    python benchmarks/host.py OUT.csv [--tokens 1,16,64,512] [--dtype bfloat16] [--formats gqs,slide24] [--profile]

Measures microseconds per call of `SparseLinear`, on a layer so small that the GPU waits for the host: medians of 20
batches of 50 calls each. ``--profile`` prints Python's profile instead.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from semisparse.bench.roofline import Candidate, candidates, random_weight
from semisparse.bench.table import write_csv
from semisparse.bench.timing import time_eager
from semisparse.errors import KernelError
from semisparse.formats import get_format
from semisparse.formats.product import problem_of
from semisparse.nn import SparseLinear
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

SIDE = 512
"""N and K of the layer: its matmul takes the GPU a few microseconds."""

GPU = torch.device("cuda")

PROFILED_CALLS = 2000


@dataclass(frozen=True)
class Cost:
    """Host time of a call in microseconds: the median, and the 10th and 90th percentile."""

    machine: str
    software: str
    layer: str
    kernel: str
    m: int
    dtype: str
    us: float
    low_us: float
    high_us: float


def layers(dtype: torch.dtype, formats: list[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``nn.Linear`` and a layer per format and variant, with their labels."""
    yield "nn.Linear", nn.Linear(SIDE, SIDE, bias=False, device=GPU, dtype=dtype)
    sparser = Candidate("vector_nm", "4:32v32")
    for candidate in (*candidates(formats), *([sparser] if formats is None or sparser.format in formats else [])):
        weight = random_weight(parse_pattern(candidate.pattern), SIDE, SIDE, dtype, GPU)
        packed = get_format(candidate.format).pack(weight, candidate.pattern, **candidate.options)
        yield candidate.label, SparseLinear(packed.to(GPU))


def kernel_of(layer: nn.Module, x: Tensor) -> str:
    """Return the name of a layer's kernel for x; empty for ``nn.Linear``."""
    if not isinstance(layer, SparseLinear):
        return ""
    return get_format(layer.packed.spec.format).choose(problem_of(x, layer.packed)).name


def profile(call: Callable[[], Tensor]) -> None:
    """Print the functions that take most of the host's time in a call."""
    call()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED_CALLS):
        call()
    profiler.disable()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", default="1,16,64,512")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--formats", help="comma-separated; all by default")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    dtype, facts = getattr(torch, options.dtype), device_facts(GPU)
    costs: list[Cost] = []
    for name, layer in layers(dtype, options.formats and options.formats.split(",")):
        for m in (int(m) for m in options.tokens.split(",")):
            x = torch.randn(m, SIDE, device=GPU, dtype=dtype)
            try:
                kernel = kernel_of(layer, x)
            except KernelError as error:
                print(f"{name}, {m} tokens: {error}", flush=True)
                continue
            with torch.inference_mode():
                if options.profile:
                    print(f"{name} {kernel}, {m} tokens", flush=True)
                    profile(partial(layer, x))
                    continue
                time = time_eager(partial(layer, x))
            costs.append(
                Cost(facts.name, facts.driver, name, kernel, m, options.dtype, time.us, time.low_us, time.high_us)
            )
            print(f"{name:34} {kernel:14} {m:4d} {time.us:7.1f} us", flush=True)
            write_csv(options.out, costs)


if __name__ == "__main__":
    main()

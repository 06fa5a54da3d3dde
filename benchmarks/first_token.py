"""A prompt's pass and a batch's decode step: who permutes x, and tiles of 128 or of 256 tokens.

    python benchmarks/first_token.py OUT.csv KERNELS.csv [--weights dense,bitmask,gqs,vector_nm,ec_csr] [--blocks 32]
        [--prompts 512] [--batches 32]

llama2-7b with random weights, bfloat16. The variants are captured in CUDA graphs and replayed in turns; column
`same_bits` says whether their logits are equal. KERNELS.csv has the kernels of one replay: how often each runs, and its
microseconds in all. Work ``first`` is the engine's own pass over a prompt on an idle GPU, wall time until the host has
the token; replays in a row make the GPU lower its clock.

- ``own``: x is permuted by kernels of their own. ``fused``: by the norm or SiLU before, where there is one.
- ``fused, 128``: likewise, and GEMMs take tiles of 128 tokens as often as before (`gemm_schedule.SMALL_TILES_FACTOR`).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from blocks import backend_of, integers
from decode_step import WEIGHTS
from rows import write_rows
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.engine import Sampling
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.engine.projection import Projection
from semisparse.formats import product
from semisparse.runtime import gemm_schedule
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")
ROUNDS, AT_ONCE = 7, 6
PAUSE = 0.2
"""Seconds before each first token: the GPU is idle, as before a command's."""

POSITION = 160
OWN, FUSED, SMALL = "own", "fused", "fused, 128"
VARIANTS = (OWN, FUSED, SMALL)
Row = dict[str, str]


@contextmanager
def variant_of(name: str) -> Iterator[None]:
    """Make the engine as a variant has it."""
    with ExitStack() as stack:
        if name == OWN:
            stack.enter_context(patch.object(Projection, "permutation", lambda projection, m, dtype: None))
        if name == SMALL:
            stack.enter_context(patch.object(gemm_schedule, "SMALL_TILES_FACTOR", 1))
        product._prepared.cache_clear()
        yield
    product._prepared.cache_clear()


@torch.no_grad()
def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a call, and return the graph and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of a replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(AT_ONCE):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / AT_ONCE


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """Return the microseconds of each kernel's runs in a replay."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]].append(event.time_range.end - event.time_range.start)
    return times


@dataclass(frozen=True)
class Work:
    """What is timed: a prompt of ``count`` tokens, or a step of ``count`` sequences."""

    name: str
    count: int
    compile: Callable[[], None]
    call: Callable[[], Tensor]


def works(backend: DecoderBackend, prompts: list[int], batches: list[int]) -> Iterator[Work]:
    """Yield what is timed."""
    decoder = backend.decoder
    for length in prompts:
        backend._state_for(1, length + 1)
        tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).to(GPU)
        last, cache = torch.tensor([length - 1], device=GPU), Cache.make(decoder, 1, length)
        yield Work(
            "prompt",
            length,
            partial(backend.compile, [[0] * length], 1, 0),
            partial(decoder.padded_prompt, tokens, last, cache),
        )
    for count in batches:
        state = backend._state_for(count, POSITION + 8)
        positions = torch.full((count,), POSITION, dtype=torch.int32, device=GPU)
        tokens = random_prompts(backend.vocabulary, Workload(count, 1, 1)).to(GPU)
        yield Work(
            "step",
            count,
            partial(backend.compile, [[0] * 16] * count, POSITION, 0),
            partial(decoder.step, tokens, positions, state.cache),
        )


def first_tokens(backend: DecoderBackend, length: int) -> list[float]:
    """Return the seconds until the host has the first token, of several runs."""
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).tolist()
    backend.compile(tokens, 1, 0)
    times = []
    for _ in range(ROUNDS + 4):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        start = time.perf_counter()
        for _ in backend.run(tokens, 1, Sampling()):
            pass
        times.append(time.perf_counter() - start)
    return times[2:]


def measure(options: argparse.Namespace, weights: str) -> Iterator[tuple[Row, list[Row]]]:
    """Yield a row per work and variant, and the rows of its kernels."""
    start = time.perf_counter()
    model = random_model("llama2-7b", torch.bfloat16, GPU, WEIGHTS[weights], options.blocks)
    backend, facts = backend_of(model), device_facts(GPU)
    print(f"{weights}: built in {time.perf_counter() - start:.0f} s", flush=True)
    software = {"machine": facts.name, "software": facts.driver}
    variants = options.variants.split(";") if weights != "dense" else [OWN]

    def row_of(work: str, count: int, variant: str, us: list[float], equal: bool | None) -> Row:
        base = {"blocks": str(options.blocks), "weights": weights, "work": work, "count": str(count)}
        times = {"us": f"{median(us):.1f}", "low_us": f"{min(us):.1f}", "high_us": f"{max(us):.1f}"}
        same = "" if equal is None else str(equal)
        return {**base, "variant": "" if weights == "dense" else variant, **times, "same_bits": same, **software}

    for work in works(backend, options.prompts, options.batches):
        graphs = {}
        for variant in variants:
            with variant_of(variant):
                work.compile()
                graphs[variant] = captured(work.call)
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(ROUNDS):
            for variant in variants:
                times[variant].append(1e6 * seconds(graphs[variant][0]))
        outputs = [output for _, output in graphs.values()]
        equal = all(torch.equal(output, outputs[0]) for output in outputs[:2]) and bool(outputs[0].isfinite().all())
        for variant in variants:
            runs = kernels_of(graphs[variant][0])
            row = row_of(work.name, work.count, variant, times[variant][1:], equal)
            base = {key: row[key] for key in ("blocks", "weights", "work", "count", "variant")}
            found = [
                {**base, "kernel": name, "launches": str(len(of)), "us": f"{sum(of):.1f}", **software}
                for name, of in sorted(runs.items(), key=lambda item: -sum(item[1]))
            ]
            yield row, found
        del graphs, outputs
    for length in options.prompts:
        wall = [1e6 * value for value in first_tokens(backend, length)]
        yield row_of("first", length, FUSED, wall, None), []


def main() -> None:
    """Measure, and write the files after each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--weights", default="dense,bitmask,gqs,vector_nm,ec_csr")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--prompts", type=integers, default=[512])
    parser.add_argument("--batches", type=integers, default=[32])
    parser.add_argument("--variants", default=";".join(VARIANTS))
    options = parser.parse_args()
    rows: list[Row] = []
    kernels: list[Row] = []
    for weights in options.weights.split(","):
        for row, found in measure(options, weights):
            rows.append(row)
            kernels += found
            write_rows(options.out, rows, list(rows[0]))
            if found:
                write_rows(options.kernels, kernels, list(kernels[0]))
            print(*row.values(), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""The steps and prompts of blocks.py with all formats in one process, which take turns.

    python benchmarks/blocks_in_turns.py OUT.csv [--arch llama2-7b] [--blocks 8] [--batches 1,8,32,64,128]
        [--prompts 128,256,512,1024,2048,4096,8192] [--seconds 200]

Needs a GPU. A process per format compares a GPU that has just started with one at its power limit, and a quiet host
with a busy one. Here each round runs every format once, every other round in reverse order, so all see the same clock.
The first rounds, half a second, are not counted. ``work`` is, as in blocks.py: ``step``, ``prompt``, ``eager`` and
``wall``; ``alone`` is ``eager`` with nothing of other formats in between. Weights with ``late`` have the same graphs,
but GEMMs start when the kernel before the one that writes x has ended, up to ``MOST_LATE`` tokens; without ``late``
they start early for any number of tokens (`MAX_EARLY_TOKENS`), except as ``eager``, ``wall`` and ``alone``.
``--only-compile`` times nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from blocks import CONTEXT, GPU, POSITION, STEPS, WEIGHTS, Row, Subject, backend_of, captured, integers

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.bench.table import write_csv
from semisparse.engine import Sampling
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.runtime import expand_gemm

ROUNDS, WARM_SECONDS = 11, 0.5
MOST_LATE = 512
Backends = dict[str, DecoderBackend]
Run = Callable[[], float]
"""Runs once, and returns the seconds."""


def prepare(options: argparse.Namespace, weights: str) -> DecoderBackend:
    """Build a model and its engine, and compile what will be timed."""
    start = time.perf_counter()
    model = random_model(options.arch, torch.bfloat16, GPU, WEIGHTS[weights], options.blocks)
    model.config.max_position_embeddings = CONTEXT
    backend = backend_of(model)
    for count in options.batches:
        backend.compile([[0] * 16] * count, POSITION, 0)
    for length in options.prompts:
        backend.compile([[0] * length], 1, 0)
    print(f"{weights}: prepared in {time.perf_counter() - start:.0f} s", flush=True)
    return backend


def in_turns(runs: dict[str, Run], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Run all in turns; return the seconds of each run after the first rounds."""
    order, begin, warm = list(runs), time.perf_counter(), True
    found: dict[str, list[float]] = {name: [] for name in runs}
    while warm or len(found[order[0]]) < rounds:
        warm = warm and time.perf_counter() - begin < WARM_SECONDS
        for name in order:
            seconds = runs[name]()
            if not warm:
                found[name].append(seconds)
        order.reverse()
    return found


def replaying(graph: torch.cuda.CUDAGraph, times: int, before: Callable[[], object] = lambda: None) -> Run:
    """Return what replays a graph so often, and returns the seconds per replay."""

    def run() -> float:
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end) / times

    return run


@contextmanager
def starting(early: bool) -> Iterator[None]:
    """Capture kernels that start early, or not."""
    before = expand_gemm.MAX_EARLY_TOKENS
    expand_gemm.MAX_EARLY_TOKENS = expand_gemm.MAX_TOKENS if early else 0
    yield
    expand_gemm.MAX_EARLY_TOKENS = before


def stepping(backend: DecoderBackend, count: int, early: bool = True) -> Run:
    """Return what runs `STEPS` captured decode steps of ``count`` sequences."""
    backend.compile([[0] * 16] * count, POSITION, 0)
    prompts = random_prompts(backend.vocabulary, Workload(count, 16, 1)).tolist()
    with torch.no_grad():
        state, _ = backend.begin(prompts, POSITION + STEPS)
        with starting(early):
            backend._graphs = {}
            graph = backend._graph(state, Sampling())

    def reset() -> None:
        state.positions.fill_(POSITION)
        state.steps.zero_()

    return replaying(graph, STEPS, reset)


@torch.no_grad()
def prompting(backend: DecoderBackend, length: int) -> tuple[Run, Run, Run, Run]:
    """Return what runs a prompt captured, launched from Python, as `generate` runs it, and captured late."""
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).tolist()
    backend.compile(tokens, 1, 0)
    captures = backend._captured_length
    decoder = backend.decoder
    cache = Cache.make(decoder, 1, length)
    on_gpu, last = torch.tensor(tokens, device=GPU), torch.tensor([length - 1], device=GPU)

    def wall() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in backend.run(tokens, 1, Sampling()):
            pass
        return time.perf_counter() - start

    def eager() -> float:
        backend._captured_length = lambda lengths, cache: None  # type: ignore[method-assign]
        try:
            return wall()
        finally:
            backend._captured_length = captures  # type: ignore[method-assign]

    eager(), wall()
    times, graphs = 3 if length < 4096 else 1, []
    for early in (True, False):
        with starting(early):
            graphs.append(captured(lambda: decoder.padded_prompt(on_gpu, last, cache)))
    return replaying(graphs[0], times), eager, wall, replaying(graphs[1], times)


def measure(options: argparse.Namespace, backends: Backends) -> Iterator[Row]:
    """Time prompts, then steps."""

    def rows(work: str, count: int, found: dict[str, list[float]]) -> Iterator[Row]:
        for name, seconds in found.items():
            yield Subject(options.arch, options.blocks, name).row(work, count, seconds)

    for length in options.prompts:
        runs = {name: prompting(backend, length) for name, backend in backends.items()}
        for index, work in enumerate(("prompt", "eager", "wall")):
            compared = {name: of[index] for name, of in runs.items()}
            if work == "prompt" and length <= MOST_LATE:
                compared |= {f"{name} late": of[3] for name, of in runs.items() if name != "dense"}
            yield from rows(work, length, in_turns(compared))
        if length <= 512:
            for name, of in runs.items():
                yield from rows("alone", length, in_turns({name: of[1]}))
        del runs
        torch.cuda.empty_cache()
    for count in options.batches:
        steps = {name: stepping(backend, count) for name, backend in backends.items()}
        steps |= {f"{name} late": stepping(of, count, early=False) for name, of in backends.items() if name != "dense"}
        yield from rows("step", count, in_turns(steps))


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default="dense,bitmask,gqs,vector_nm,ec_csr")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--prompts", type=integers, default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--seconds", type=float, default=200, help="of measuring, after which the rest is left out")
    parser.add_argument("--only-compile", action="store_true")
    options = parser.parse_args()
    backends = {weights: prepare(options, weights) for weights in options.weights.split(",")}
    if options.only_compile:
        return
    begin, found = time.perf_counter(), []
    for row in measure(options, backends):
        found.append(row)
        write_csv(options.out, found)
        print(row.weights, row.work, row.count, row.us, row.low_us, row.high_us, flush=True)
        if time.perf_counter() - begin > options.seconds:
            print("time is up", flush=True)
            return
    print(f"measured in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()

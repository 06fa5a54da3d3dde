"""A few decoder blocks of a known model in every format: decode steps by batch, and prompts by length.

    python benchmarks/blocks.py OUT.csv [--arch llama2-7b] [--blocks 8] [--weights dense,bitmask,gqs,vector_nm,ec_csr]
        [--batches 1,8,32,64,128] [--prompts 128,512,2048,8192] [--deterministic 1,16] [--copied gqs]

Random weights, bfloat16, in the engine: ``blocks`` decoder blocks and the head. ``us`` is:

- ``step``: a decode step of ``count`` sequences, a CUDA graph replayed from position 160 on. The first rows have all
  blocks of the model, from position 512 on.
- ``deterministic``: the same step with ``deterministic_batch=True``.
- ``kept``: the same step with dense copies of all layers (``keep_dense``), for the weights of ``--copied``.
- ``prompt``: a prompt of ``count`` tokens, captured in a CUDA graph.
- ``eager``: the same launched from Python, wall time until the host has the token.
- ``first``: the first prompt of this length, as ``eager``; kernels of other lengths have run.
- ``kept prompt``: as ``prompt``, with dense copies.
- ``wall``: as `generate` runs it, wall time until the host has the token; up to 2,048 tokens it is captured.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from decode_step import WEIGHTS
from torch import Tensor
from transformers import PreTrainedModel
from turns import turn

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.bench.shapes import ARCHITECTURES
from semisparse.bench.table import write_csv
from semisparse.engine import Engine, Sampling
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")
CONTEXT = 16384
"""Maximum positions, in place of the architecture's."""

REPEATS = 9
STEPS = 32
"""Decode steps that are timed at once."""

POSITION, WHOLE_POSITION = 160, 512
"""The first step's position."""


@dataclass(frozen=True)
class Row:
    """A line of the CSV; ``us``, ``low_us`` and ``high_us`` are the median, least and most of ``repeats`` runs."""

    arch: str
    blocks: int
    weights: str
    work: str
    count: int
    us: float
    low_us: float
    high_us: float
    repeats: int
    machine: str
    software: str


@dataclass(frozen=True)
class Subject:
    """What rows have in common."""

    arch: str
    blocks: int
    weights: str

    def row(self, work: str, count: int, seconds: list[float]) -> Row:
        """Return a CSV row."""
        us, facts = [1e6 * value for value in seconds], device_facts(GPU)
        least, most = round(min(us), 1), round(max(us), 1)
        ran = (len(us), facts.name, facts.driver)
        return Row(self.arch, self.blocks, self.weights, work, count, round(median(us), 1), least, most, *ran)


def replayed(graph: torch.cuda.CUDAGraph, at_once: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Return the seconds per replay, for `REPEATS` times ``at_once`` replays. ``before`` is called before, untimed."""
    times = []
    for _ in range(REPEATS + 1):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(at_once):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * start.elapsed_time(end) / at_once)
    return times[1:]


def backend_of(model: PreTrainedModel, deterministic: bool = False, keep_dense: Sequence[str] = ()) -> DecoderBackend:
    """Return the engine's backend."""
    start = time.perf_counter()
    backend = Engine(model, deterministic_batch=deterministic, keep_dense=keep_dense).backend
    print(f"engine of {len(model.model.layers)} blocks: {time.perf_counter() - start:.1f} s", flush=True)
    assert isinstance(backend, DecoderBackend)
    return backend


def step(backend: DecoderBackend, count: int, position: int) -> list[float]:
    """Time the captured decode step of ``count`` sequences, from a position on."""
    backend.compile([[0] * 16] * count, position, 0)
    prompts = random_prompts(backend.vocabulary, Workload(count, 16, 1)).tolist()
    with torch.no_grad():
        state, _ = backend.begin(prompts, position + STEPS)
        graph = backend._graph(state, Sampling())

    def reset() -> None:
        state.positions.fill_(position)
        state.steps.zero_()

    return replayed(graph, STEPS, reset)


@torch.no_grad()
def prompt(backend: DecoderBackend, length: int) -> Iterator[tuple[str, list[float]]]:
    """Time a prompt, eager and captured; yield what was timed and the seconds of each run."""
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).tolist()
    backend.compile(tokens, 1, 0)
    backend._state_for(1, length + 1)

    def eager() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in backend.run(tokens, 1, Sampling()):
            pass
        return time.perf_counter() - start

    def wall() -> list[float]:
        return [eager() for _ in range(REPEATS)]

    captures = backend.prompts.length
    backend.prompts.length = lambda lengths, cache: None  # type: ignore[method-assign]
    yield "first", [eager()]
    yield "eager", wall()
    backend.prompts.length = captures  # type: ignore[method-assign]
    eager()
    yield "wall", wall()
    decoder = backend.decoder
    cache = Cache.make(decoder, 1, length)
    on_gpu, last = torch.tensor(tokens, device=GPU), torch.tensor([length - 1], device=GPU)
    yield "prompt", replayed(captured(lambda: decoder.padded_prompt(on_gpu, last, cache)), 3)


def captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Capture a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@dataclass
class Prepared:
    """Engines with compiled kernels: of the whole model, of its first blocks, and of these in other modes."""

    whole: DecoderBackend | None
    blocks: DecoderBackend
    copied: DecoderBackend | None
    deterministic: DecoderBackend | None


def prepare(options: argparse.Namespace, weights: str) -> Prepared:
    """Build a model and its engines, and compile what will be timed."""
    layers = None if options.whole else options.blocks
    model = random_model(options.arch, torch.bfloat16, GPU, WEIGHTS[weights], layers)
    model.config.max_position_embeddings = CONTEXT
    whole = backend_of(model) if options.whole else None
    model.model.layers = model.model.layers[: options.blocks]
    copied = weights in options.copied.split(",")
    found = Prepared(
        whole,
        backend_of(model),
        backend_of(model, keep_dense=["*"]) if copied else None,
        backend_of(model, deterministic=True) if options.deterministic else None,
    )
    for count in options.whole if whole else []:
        whole.compile([[0] * 16] * count, WHOLE_POSITION, 0)
    for backend in filter(None, (found.blocks, found.copied)):
        for count in options.batches:
            backend.compile([[0] * 16] * count, POSITION, 0)
        for length in options.prompts:
            backend.compile([[0] * length], 1, 0)
    return found


def measure(options: argparse.Namespace, weights: str) -> Iterator[Row]:
    """Time one format."""
    start = time.perf_counter()
    prepared = prepare(options, weights)
    print(f"{weights}: prepared in {time.perf_counter() - start:.0f} s", flush=True)
    subject = Subject(options.arch, options.blocks, weights)
    with turn(options.turn):
        start = time.perf_counter()
        if prepared.whole:
            whole = Subject(options.arch, len(prepared.whole.decoder.layers), weights)
            for count in options.whole:
                yield whole.row("step", count, step(prepared.whole, count, WHOLE_POSITION))
        for count in options.batches:
            yield subject.row("step", count, step(prepared.blocks, count, POSITION))
        for _ in prompt(prepared.blocks, 16):  # loads what does not depend on the length
            pass
        for length in options.prompts:
            for work, seconds in prompt(prepared.blocks, length):
                yield subject.row(work, length, seconds)
        if prepared.copied:
            for count in options.batches:
                yield subject.row("kept", count, step(prepared.copied, count, POSITION))
            for length in options.prompts:
                for work, seconds in prompt(prepared.copied, length):
                    if work == "prompt":
                        yield subject.row("kept prompt", length, seconds)
        if prepared.deterministic:
            for count in options.deterministic:
                yield subject.row("deterministic", count, step(prepared.deterministic, count, POSITION))
        print(f"{weights}: measured in {time.perf_counter() - start:.0f} s", flush=True)


def integers(text: str) -> list[int]:
    """Read comma-separated integers."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default="dense,bitmask,gqs,vector_nm,ec_csr")
    parser.add_argument("--whole", type=integers, default=[1, 8], help="batches with all of the model's blocks")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--prompts", type=integers, default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--deterministic", type=integers, default=[1, 16], help="batches with deterministic_batch")
    parser.add_argument("--copied", default="", help="weights that are also timed with dense copies")
    parser.add_argument("--turn", type=Path, help="folder of turns.py, for a process per format")
    options = parser.parse_args()
    rows: list[Row] = []
    for weights in options.weights.split(","):
        for row in measure(options, weights):
            rows.append(row)
            write_csv(options.out, rows)
            print(row.weights, row.blocks, row.work, row.count, row.us, row.low_us, row.high_us, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

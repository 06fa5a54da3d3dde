"""One captured decode step of the engine, kernel by kernel: how long each takes, and how much it adds.

    python benchmarks/decode_step.py OUT.csv [--model llama2-7b] [--weights dense,bitmask,gqs] [--batch 1,8]
        [--layers 8]

Random weights, bfloat16. Kernels overlap (programmatic dependent launch): one is resident, and loads its
weight, while the one before still runs. So a kernel's duration says little. What it adds is from the end of the kernel
before to its own end; these times add up to the step. Medians over all layers but the first and the last.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.bench.roofline import Candidate
from semisparse.bench.table import write_csv
from semisparse.engine import Engine, Sampling
from semisparse.engine.backend import DecoderBackend
from semisparse.runtime.device import device_facts

GPU = torch.device("cuda")

WEIGHTS = {
    "dense": None,
    "bitmask": Candidate("bitmask", "32:64"),
    "gqs": Candidate("gqs", "g16@50%", {"kind": "w4"}),
    "ec_csr": Candidate("ec_csr", "70%"),
    "vector_nm": Candidate("vector_nm", "16:32v32"),
}

ORDER = ("o", "gate_up", "down", "qkv")
"""A layer's matmuls, from its attention to the next one's."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a layer, or of the step outside of the layers; ``added_us`` is from the end of the one before."""

    model: str
    weights: str
    batch: int
    part: str
    kernel: str
    weight_mb: float
    us: float
    starts_before_end_us: float
    added_us: float
    per_step: int
    machine: str
    software: str


@dataclass(frozen=True)
class Event:
    """A kernel's run: name, start and end in microseconds."""

    name: str
    start: float
    end: float


def events_of_a_step(backend: DecoderBackend, position: int) -> list[Event]:
    """Replay the captured step at a position under the profiler, and return its kernels in order."""
    state = backend._state
    assert state is not None
    graph = backend._graph(state, Sampling())
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(3):
            state.positions.fill_(position)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
    of_gpu = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events = sorted(
        (Event(e.name, e.time_range.start, e.time_range.end) for e in of_gpu), key=lambda event: event.start
    )
    last = max(i for i, event in enumerate(events) if "fill" in event.name.lower())
    return events[last + 1 :]


Run = tuple[float, float, float]
"""Microseconds: duration, of it before the end of the kernel before, added."""


OWN = ("semisparse_engine", "semisparse_silu_mul", "semisparse_permute_x", "splitKreduce")
"""Parts of the names of a layer's kernels that are no matmuls, or the end of the matmul before."""


def kernels_of(backend: DecoderBackend, events: list[Event]) -> Iterator[tuple[str, str, float, list[Run]]]:
    """Yield part, kernel's name, weight in MB, and each run that counts."""
    ends = [max(event.end for event in events[: i + 1]) for i in range(len(events))]

    def timed(i: int) -> Run:
        before = ends[i - 1] if i else events[0].start
        return events[i].end - events[i].start, before - events[i].start, ends[i] - before

    heads = [i for i, event in enumerate(events) if "attention" in event.name]
    period, layer = heads[1] - heads[0], backend.decoder.layers[0]
    weights = {part: sum(w.nbytes for w in getattr(layer, part).weights) / 1e6 for part in ORDER}
    parts = iter(ORDER)
    for offset in range(period):
        runs = [head + offset for head in heads[1:-2]]
        name = events[runs[0]].name
        part = "" if any(own in name for own in OWN) else next(parts, "")
        yield part, name, weights.get(part, 0.0), [timed(run) for run in runs]
    for i in [*range(heads[0] - 1), *range(heads[-1] + period - 1, len(events))]:
        yield "outside", events[i].name, 0.0, [timed(i)]


def profiled(model_name: str, layers: int | None, weights: str, batches: list[int], position: int) -> Iterator[Kernel]:
    """Profile a model with random weights."""
    model = random_model(model_name, torch.bfloat16, GPU, WEIGHTS[weights], layers)
    engine = Engine(model)
    assert isinstance(engine.backend, DecoderBackend)
    facts, per_step = device_facts(GPU), len(engine.backend.decoder.layers)
    for batch in batches:
        prompts = random_prompts(engine.backend.vocabulary, Workload(batch, 512, 128)).tolist()
        for _ in engine.backend.run(prompts, 128, Sampling()):
            pass
        for part, name, mb, runs in kernels_of(engine.backend, events_of_a_step(engine.backend, position)):
            us, overlap, added = (median(column) for column in zip(*runs, strict=True))
            count, ran = 1 if part == "outside" else per_step, (facts.name, facts.driver)
            yield Kernel(model_name, weights, batch, part, name[:60], mb, us, overlap, added, count, *ran)


def main() -> None:
    """Profile each format's step, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of all")
    parser.add_argument("--weights", default="dense,bitmask,gqs")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--position", type=int, default=560, help="position of the token that the step takes")
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batch.split(",")]
    kernels: list[Kernel] = []
    for weights in arguments.weights.split(","):
        found = list(profiled(arguments.model, arguments.layers, weights, batches, arguments.position))
        for batch in batches:
            show(weights, batch, [kernel for kernel in found if kernel.batch == batch])
        kernels += found
        gc.collect()
        torch.cuda.empty_cache()
        write_csv(arguments.out, kernels)


def show(weights: str, batch: int, kernels: list[Kernel]) -> None:
    """Print a step's kernels."""
    step_ms = sum(kernel.added_us * kernel.per_step for kernel in kernels) / 1e3
    print(weights, f"batch {batch}: {step_ms:.3f} ms", flush=True)
    for kernel in kernels:
        times = f"{kernel.us:7.2f} us, {kernel.added_us:7.2f} added"
        print(f"  {kernel.part:8} {kernel.kernel:50.50} {kernel.weight_mb:7.1f} MB {times}")


if __name__ == "__main__":
    main()

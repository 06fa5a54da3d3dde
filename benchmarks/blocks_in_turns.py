"""The steps and prompts of blocks.py with all formats in one process, which take turns.

    python benchmarks/blocks_in_turns.py OUT.csv [--arch llama2-7b] [--blocks 8] [--batches 1,8,32,64,128]
        [--prompts 128,256,512,1024,2048,4096,8192] [--seconds 200] [--works prompt,idle,eager,wall,step]
        [--starts 96] [--attention 4,8,3,4,5,4]

Needs a GPU. A process per format compares a GPU that has just started with one at its power limit, and a quiet host
with a busy one. Here all formats take turns. A turn is `WARM_SECONDS` of runs that are not counted, in which the clock
falls to what the format's own power allows, and `COUNTED_SECONDS` that are. With turns of one run, what ran before
decided: a GEMM took 12.8 ms behind dense and 11.6 behind unpacked weights. ``work`` is, as in blocks.py: ``step``,
``prompt``, ``eager`` and ``wall``; ``idle`` is ``prompt`` once after `PAUSE` seconds in which the GPU has rested.

Weights with ``late`` have the same graphs, but GEMMs start when the kernel before the one that writes x has ended;
those with ``early`` start before that. Without either they start as the engine has it (`MAX_EARLY_TOKENS`).
They are compared for the counts of ``--starts``. Weights with ``gemm`` never unpack, those with ``unpack`` always do,
in prompts of `LEAST_UNPACKED` to `MOST_UNPACKED` tokens. Weights with ``attention 4x8x3`` have an attention of 4 warps
per CTA, 8 positions per team in flight and registers for 3 CTAs per SM in their steps (``--attention``), and K and V
unsplit. With ``--crowded``, weights with ``crowded`` have GEMMs in steps whose schedule is chosen as if their CTAs
crowd onto the SMs where the kernel before ends first, those with ``crowded down`` only where K is larger than N. Those
with ``crowded two`` may also have two CTAs of one warpgroup per SM. ``--only-compile`` times nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from blocks import CONTEXT, GPU, POSITION, STEPS, WEIGHTS, Row, Subject, backend_of, captured, integers

from semisparse.bench.model import Workload, random_model, random_prompts
from semisparse.bench.table import write_csv
from semisparse.engine import Sampling, attention, attention_schedule
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.decoder import Cache
from semisparse.errors import KernelError
from semisparse.formats import product
from semisparse.formats.base import Format
from semisparse.formats.kernel import Kernel, Problem
from semisparse.runtime import expand_gemm, gemm_schedule

ROUNDS, WARM_SECONDS, COUNTED_SECONDS = 3, 0.2, 0.1
IDLE_ROUNDS, PAUSE = 7, 0.15
LEAST_UNPACKED, MOST_UNPACKED = 1024, 4096
"""Tokens for which GEMMs and unpacked weights are compared."""

KERNELS = {"gemm": ("gemm_wgmma", "gemm"), "unpack": ("unpack_tiles", "unpack")}
"""Kernels by what follows the weights' name, the preferred ones first."""

WORKS = ("prompt", "idle", "eager", "wall", "step")
NOTHING: AbstractContextManager[None] = nullcontext()
Backends = dict[str, DecoderBackend]
Run = Callable[[], float]
"""Runs once, and returns the seconds."""

Captured = TypeVar("Captured")


def prepare(options: argparse.Namespace, weights: str) -> DecoderBackend:
    """Build a model and its engine, and compile what will be timed."""
    start = time.perf_counter()
    model = random_model(options.arch, torch.bfloat16, GPU, WEIGHTS[weights], options.blocks)
    model.config.max_position_embeddings = CONTEXT
    backend = backend_of(model)
    for count in options.batches:
        backend.compile([[0] * 16] * count, POSITION, 0)
        for two in (False, True) if options.crowded else ():
            with crowding(True, two):
                backend.compile([[0] * 16] * count, POSITION, 0)
    for length in options.prompts:
        backend.compile([[0] * length], 1, 0)
    for kind in KERNELS:
        with choosing(kind):
            for length in options.prompts:
                if LEAST_UNPACKED <= length <= MOST_UNPACKED:
                    backend.decoder.compile(1, [1], [length])
    print(f"{weights}: prepared in {time.perf_counter() - start:.0f} s", flush=True)
    return backend


def in_turns(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Run all in turns, each round from another one on; return the counted seconds."""
    order = list(runs)
    found: dict[str, list[float]] = {name: [] for name in order}
    for number in range(ROUNDS):
        first = number * len(order) // ROUNDS
        for name in order[first:] + order[:first]:
            begin = time.perf_counter()
            while time.perf_counter() - begin < WARM_SECONDS:
                runs[name]()
            counted = [runs[name]()]
            while time.perf_counter() - begin < WARM_SECONDS + COUNTED_SECONDS:
                counted.append(runs[name]())
            found[name] += counted
    return found


def rested(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Run all in turns, once each per round, after a pause; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(IDLE_ROUNDS + 1):
        for name, run in runs.items():
            time.sleep(PAUSE)
            seconds = run()
            if number:
                found[name].append(seconds)
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
    with patch.object(expand_gemm, "MAX_EARLY_TOKENS", gemm_schedule.MAX_TOKENS if early else 0):
        yield


@contextmanager
def attending(warps: int, ahead: int, ctas: int) -> Iterator[None]:
    """Capture an attention of a schedule."""
    schedule = attention_schedule.Schedule(1, warps, ahead, ctas)
    with patch.object(attention, "choose_schedule", lambda *arguments: schedule):
        yield


@contextmanager
def crowding(everywhere: bool, two: bool = False) -> Iterator[None]:
    """Capture GEMMs whose schedule is chosen for crowded SMs, everywhere or only where K is larger than N."""
    more = {tile_m: ((1, 1, 2), *gemm_schedule.SPLIT_K[tile_m]) for tile_m in (16, 32, 64)} if two else {}
    before = gemm_schedule.h200_microseconds

    def estimate(
        schedule: gemm_schedule.Schedule,
        m: int,
        weight: gemm_schedule.Tiles,
        sms: int,
        rates: gemm_schedule.Rates,
        crowded: bool = False,
    ) -> float:
        tall = weight.column_tiles * gemm_schedule.COLUMNS > weight.row_tiles * gemm_schedule.ROWS
        return before(schedule, m, weight, sms, rates, crowded or everywhere or tall)

    product._prepared.cache_clear()
    with (
        patch.object(gemm_schedule, "h200_microseconds", estimate),
        patch.object(gemm_schedule, "SPLIT_K", {**gemm_schedule.SPLIT_K, **more}),
    ):
        yield
    product._prepared.cache_clear()


@contextmanager
def choosing(kind: str) -> Iterator[None]:
    """Capture kernels of a kind of `KERNELS` wherever a format has one that can compute the matmul."""
    before = Format.choose

    def choose(form: Format, problem: Problem, kernel: str = "auto") -> Kernel:
        for name in KERNELS[kind]:
            found = next((one for one in form.kernels if one.name == name), None)
            if kernel == "auto" and found and found.refusal(problem) is None:
                return found
        return before(form, problem, kernel)

    product._prepared.cache_clear()
    with patch.object(Format, "choose", choose):
        yield
    product._prepared.cache_clear()


def stepping(
    backend: DecoderBackend, count: int, variant: AbstractContextManager[None] = NOTHING, position: int = POSITION
) -> Run:
    """Return what runs `STEPS` captured decode steps of ``count`` sequences, captured in a variant."""
    backend.compile([[0] * 16] * count, position, 0)
    prompts = random_prompts(backend.vocabulary, Workload(count, 16, 1)).tolist()
    with torch.no_grad():
        state, _ = backend.begin(prompts, position + STEPS)
        with variant:
            backend._graphs = {}
            graph = backend._graph(state, Sampling())

    def reset() -> None:
        state.positions.fill_(position)
        state.steps.zero_()

    return replaying(graph, STEPS, reset)


@torch.no_grad()
def capturing(
    backend: DecoderBackend, length: int, variant: AbstractContextManager[None] = NOTHING
) -> tuple[torch.cuda.CUDAGraph, object]:
    """Return the graph of a prompt, captured in a variant, and what has to live as long."""
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1))
    cache = Cache.make(backend.decoder, 1, length)
    on_gpu, last = tokens.to(GPU), torch.tensor([length - 1], device=GPU)
    with variant:
        graph = captured(lambda: backend.decoder.padded_prompt(on_gpu, last, cache))
    return graph, (cache, on_gpu, last)


@torch.no_grad()
def prompting(backend: DecoderBackend, length: int) -> tuple[Run, Run]:
    """Return what runs a prompt launched from Python, and as `generate` runs it."""
    tokens = random_prompts(backend.vocabulary, Workload(1, length, 1)).tolist()
    captures = backend.prompts.length

    def wall() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in backend.run(tokens, 1, Sampling()):
            pass
        return time.perf_counter() - start

    def eager() -> float:
        backend.prompts.length = lambda lengths, cache: None  # type: ignore[method-assign]
        try:
            return wall()
        finally:
            backend.prompts.length = captures  # type: ignore[method-assign]

    eager(), wall(), wall()  # the second use is captured
    return eager, wall


@dataclass(frozen=True)
class Others:
    """What is captured beside the engine's own choices: counts of ``--starts``, schedules of ``--attention``."""

    starts: Sequence[int]
    attention: Sequence[tuple[int, int, int]]
    crowded: bool


def variants(count: int, prompt: bool, others: Others) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return what is captured beside the engine's own choices, by what follows the weights' name."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    for one in () if prompt else others.attention:
        found[f" attention {one[0]}x{one[1]}x{one[2]}"] = partial(attending, *one)
    if others.crowded and not prompt:
        found |= {" crowded": partial(crowding, True), " crowded down": partial(crowding, False)}
        found[" crowded two"] = partial(crowding, True, True)
    if count in others.starts:
        early = count <= expand_gemm.MAX_EARLY_TOKENS
        found[" late" if early else " early"] = partial(starting, not early)
    if prompt and LEAST_UNPACKED <= count <= MOST_UNPACKED:
        found |= {f" {kind}": partial(choosing, kind) for kind in KERNELS}
    return found


def with_variants(
    capture: Callable[..., Captured], backends: Backends, count: int, prompt: bool, others: Others
) -> dict[str, Captured]:
    """Capture all weights and their variants, by name. A variant that cannot run is printed and left out."""
    runs = {name: capture(backend, count) for name, backend in backends.items()}
    for name, backend in backends.items():
        for suffix, variant in variants(count, prompt, others).items() if name != "dense" else ():
            try:
                runs[name + suffix] = capture(backend, count, variant())
            except (KernelError, torch.OutOfMemoryError) as error:
                print(f"{name}{suffix}, {count}: {error}"[:500], flush=True)
    return runs


def measure(options: argparse.Namespace, backends: Backends) -> Iterator[Row]:
    """Time prompts, then steps."""

    def rows(work: str, count: int, found: dict[str, list[float]]) -> Iterator[Row]:
        for name, seconds in found.items():
            yield Subject(options.arch, options.blocks, name).row(work, count, seconds)

    steps, sizes = partial(stepping, position=options.position), iter(options.attention)
    others = Others(options.starts, list(zip(sizes, sizes, sizes, strict=True)), options.crowded)
    for length in options.prompts:
        if {"prompt", "idle"} & set(options.works):
            graphs = with_variants(capturing, backends, length, True, others)
            if "prompt" in options.works:
                at_once = 1 if length > 1024 else 3
                found = in_turns({name: replaying(graph, at_once) for name, (graph, _) in graphs.items()})
                yield from rows("prompt", length, found)
            if "idle" in options.works:
                yield from rows("idle", length, rested({name: replaying(graphs[name][0], 1) for name in backends}))
            del graphs
        launched = {name: prompting(backend, length) for name, backend in backends.items()}
        for index, work in enumerate(("eager", "wall")):
            if work in options.works:
                yield from rows(work, length, in_turns({name: of[index] for name, of in launched.items()}))
        torch.cuda.empty_cache()
    for count in options.batches if "step" in options.works else ():
        yield from rows("step", count, in_turns(with_variants(steps, backends, count, False, others)))


def main() -> None:
    """Measure, and write the CSV after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama2-7b")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--weights", default="dense,bitmask,gqs,vector_nm,ec_csr")
    parser.add_argument("--batches", type=integers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--prompts", type=integers, default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--starts", type=integers, default=[], help="counts of early and late starts")
    parser.add_argument("--position", type=int, default=POSITION, help="of the tokens of a step")
    parser.add_argument("--attention", type=integers, default=[], help="warps, ahead and CTAs of each schedule")
    parser.add_argument("--crowded", action="store_true", help="schedules of crowded SMs, in steps")
    parser.add_argument("--works", type=lambda text: text.split(","), default=list(WORKS))
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

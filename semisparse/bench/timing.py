"""Honest times: CUDA graph replays over more operands than the cache holds, medians and spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from semisparse.formats.base import Packed

CACHES = 4
"""Copies of the weights take this many times the last-level cache, so that each is read from memory."""

MOST_COPIES = 400

REPLAYS = 20

FEWEST_REPLAYS = 5

GPU_SECONDS = 0.3
"""Replays of a long graph stop after this long, once there are `FEWEST_REPLAYS`."""

CPU_SECONDS = 0.3
"""A CPU measurement lasts at least this long, and until every copy has been used."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the tenth and ninetieth percentile of the repeats."""

    us: float
    low_us: float
    high_us: float


def rotating_copies(packed: Packed, cache_bytes: int) -> list[Packed]:
    """Copy a packed weight until the copies outgrow the cache `CACHES` times, or there are `MOST_COPIES`."""
    count = min(MOST_COPIES, max(2, -(-CACHES * cache_bytes // packed.nbytes)))
    copies = [Packed(packed.spec, {name: t.clone() for name, t in packed.tensors.items()}) for _ in range(count - 1)]
    return [packed, *copies]


def time_calls(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> Timing:
    """Time calls that do the same work on different operands.

    On a GPU they are captured in one CUDA graph, in order, and the graph is replayed; on a CPU they are called in turn.

    Args:
        calls: each launches on the current stream; run once before, so that nothing is compiled or loaded in capture.
        device: where they run.
    """
    return _summary(_replay_times(calls) if device.type == "cuda" else _call_times(calls))


def time_eager(call: Callable[[], object], calls: int = 1000) -> Timing:
    """Time a call from Python with the queue never full: what a launch costs the host."""
    for _ in range(20):
        call()
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // REPLAYS):
            call()
        times.append((time.perf_counter() - start) / (calls // REPLAYS))
    torch.cuda.synchronize()
    return _summary(times)


def _replay_times(calls: Sequence[Callable[[], Tensor]]) -> list[float]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    while len(times) < FEWEST_REPLAYS or (len(times) < REPLAYS and sum(times) < GPU_SECONDS):
        times.append(_seconds_of(graph))
    return [seconds / len(calls) for seconds in times]


def _seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _call_times(calls: Sequence[Callable[[], Tensor]]) -> list[float]:
    calls[0]()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < max(len(calls), REPLAYS) or time.perf_counter() - begin < CPU_SECONDS:
        start = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - start)
    return times


def _summary(seconds: Sequence[float]) -> Timing:
    tenths = [1e6 * cut for cut in quantiles(seconds, n=10)]
    return Timing(us=tenths[4], low_us=tenths[0], high_us=tenths[8])

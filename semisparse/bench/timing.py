"""Timing: medians of CUDA graph replays over more copies of the weights than fit in the L2 cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from semisparse.formats.base import Packed

CACHES = 4
"""Size of all copies of a weight divided by that of the last-level cache, so that each is read from memory."""

MOST_COPIES = 400
"""Maximum number of copies of a weight."""

REPLAYS = 20
"""Replays of the CUDA graph per measurement, unless `GPU_SECONDS` ends them earlier."""

FEWEST_REPLAYS = 5
"""Minimum number of replays."""

GRAPH_SECONDS = 0.002
"""Minimum duration of the CUDA graph; if all calls take less, it repeats them. The launch of a replay is timed, too:
of a large weight there are two copies, so half of a launch would be added to each call."""

GPU_SECONDS = 0.3
"""Replays end once they have taken this long in all, if there are at least `FEWEST_REPLAYS`."""

CPU_SECONDS = 0.3
"""A measurement on a CPU takes at least this long, one call per copy, and `REPLAYS` calls."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median, and the 10th and 90th percentile of the repeats."""

    us: float
    low_us: float
    high_us: float


def rotating_copies(packed: Packed, cache_bytes: int) -> list[Packed]:
    """Return 2 to `MOST_COPIES` copies of a packed weight, `CACHES` times ``cache_bytes`` in all if possible."""
    count = min(MOST_COPIES, max(2, -(-CACHES * cache_bytes // packed.nbytes)))
    return [packed, *(clone(packed) for _ in range(count - 1))]


def clone(packed: Packed) -> Packed:
    """Return a copy of a packed weight and its tensors."""
    return Packed(packed.spec, {name: tensor.clone() for name, tensor in packed.tensors.items()})


def time_calls(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> Timing:
    """Time calls that do the same work on different operands.

    On a GPU all calls are captured in one CUDA graph, which is replayed. On a CPU they are called in turn.

    Args:
        calls: callables that launch on the current stream. Each kernel has been compiled and loaded before.
        device: the device that they run on.
    """
    return _summary(_replay_times(calls) if device.type == "cuda" else _call_times(calls))


def time_eager(call: Callable[[], object], calls: int = 1000) -> Timing:
    """Time a call from Python: what it costs the host. The queue of launches never fills up.

    Args:
        call: launches on a GPU.
        calls: how often it is called in all, in `REPLAYS` batches.
    """
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
    graph, rounds = _captured(calls), 1
    once = _seconds_of(graph)
    if once < GRAPH_SECONDS:
        rounds = math.ceil(GRAPH_SECONDS / once)
        graph = _captured([*calls] * rounds)
    times: list[float] = []
    while len(times) < FEWEST_REPLAYS or (len(times) < REPLAYS and sum(times) < GPU_SECONDS):
        times.append(_seconds_of(graph))
    return [seconds / (rounds * len(calls)) for seconds in times]


def _captured(calls: Sequence[Callable[[], Tensor]]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # of the current GPU
        for call in calls:
            call()
    graph.replay()
    return graph


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
    deciles = [1e6 * decile for decile in quantiles(seconds, n=10)]
    return Timing(us=deciles[4], low_us=deciles[0], high_us=deciles[8])

"""Seconds of each part of compressing a decoder layer: functions of `semisparse.compress` are replaced by timed ones.

A part's time is that of its functions without the parts that they call. The main thread's stream is synchronised before
and after each, so that the whole takes a little longer than it does untimed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from semisparse.api.packed_layers import PackedLayers
from semisparse.compress import pipeline, propagate
from semisparse.compress.distributed.exchange import Exchange
from semisparse.compress.distributed.ranks import SeveralRanks
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.prune import RunningSums, layer, problem

COPY = "copy to the device"
PARTS = (
    (DecoderLayer, "copy", COPY),
    (propagate, "find_inputs", "tracing"),
    (propagate, "_sum_statistics", "forwards and sums"),
    (pipeline, "propagate", "last forwards"),
    (SeveralRanks, "_root", "exchange of sums"),
    (Exchange, "broadcast", "broadcasts, waiting included"),
    (Exchange, "receive", "receiving, waiting included"),
    (pipeline, "prune_linear", "pruning, the rest"),
    (RunningSums, "statistics", "targets"),
    (layer, "normalise", "normalising"),
    (problem, "factorise", "factors"),
    (problem, "_moved_goal", "goal"),
    (problem, "losses", "order"),
    (layer, "prune_columns", "columns"),
    (layer, "conjugate_gradient", "conjugate gradients"),
    (layer, "_relative_error", "errors"),
    (PackedLayers, "save", "waiting for packing"),
    (PackedLayers, "_pack_all", "packing, in a thread on GPUs"),
    (PackedLayers, "_finish", "writing, in a thread"),
)
"""The owner and the name of a function, and the part that it belongs to."""


class StageTimes:
    """Sums of seconds by decoder layer and part; a decoder layer begins with its copy to the device."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], float] = defaultdict(float)
        self._layer, self._inner = 0, threading.local()

    def timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function that adds the time of each call of ``work`` to a part."""

        @functools.wraps(work)
        def call(*args: Any, **kwargs: Any) -> Any:
            waits = threading.current_thread() is threading.main_thread() and torch.cuda.is_available()
            if waits:
                torch.cuda.current_stream().synchronize()
            if part == COPY:
                self._layer += 1
            stack = self._inner.__dict__.setdefault("stack", [0.0])
            stack.append(0.0)
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                if waits:
                    torch.cuda.current_stream().synchronize()
                spent = time.perf_counter() - started
                self.seconds[self._layer, part] += spent - stack.pop()
                stack[-1] += spent

        return call


@contextlib.contextmanager
def stage_times() -> Iterator[StageTimes]:
    """Time the parts of all compressions while entered."""
    times = StageTimes()
    with contextlib.ExitStack() as stack:
        for owner, name, part in PARTS:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, times.timed(getattr(owner, name), part)))
        yield times

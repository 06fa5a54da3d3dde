"""`semisparse bench machine`: the machine's measured rates, and the cost of a launch in a graph and from Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from semisparse.bench.roofline import BASELINE
from semisparse.bench.timing import Timing, time_calls, time_eager
from semisparse.formats import get_format, linear
from semisparse.nn import SparseLinear
from semisparse.patterns import NO_ZEROS
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import CudaSource
from semisparse.runtime.measure import measured_rates
from semisparse.runtime.nvrtc import unavailable

SOURCE = CudaSource(Path(__file__).with_name("launch.cu"))


GRAPH_KERNELS = 200
"""Kernels in the timed graph."""

COPIED_FLOATS = 1024
"""Number of float32 values that the timed copy kernel copies: so few that its launch takes the time."""


@dataclass(frozen=True)
class Fact:
    """One figure of a machine: a line of the CSV."""

    machine: str
    software: str
    name: str
    value: float
    unit: str


def machine_facts(device: torch.device) -> list[Fact]:
    """Return a machine's sizes, bandwidth, peaks and, on a GPU, launch costs."""
    facts = device_facts(device)
    rates = measured_rates(device)
    figures = [
        ("SMs" if facts.kind == "cuda" else "threads", facts.sms, "count"),
        ("last-level cache", facts.cache_bytes / 1e6, "MB"),
        ("memory", facts.memory_bytes / 1e9, "GB"),
        ("read bandwidth", rates.read_bandwidth / 1e12, "TB/s"),
        *((f"peak, {unit}", peak / 1e12, "T(FL)OP/s") for unit, peak in rates.peaks.items()),
    ]
    if device.type == "cuda":
        figures += [(name, timing.us, "us") for name, timing in _launch_costs(device)]
    return [Fact(facts.name, facts.driver, name, float(value), unit) for name, value, unit in figures]


def _launch_costs(device: torch.device) -> Iterator[tuple[str, Timing]]:
    """Yield the name and time of a launch, or of an eager call, in several ways."""
    if unavailable() is None:
        nothing = SOURCE.build("semisparse_nothing").load(device)
        copy = SOURCE.build("semisparse_copy").load(device)
        source, target = torch.ones(COPIED_FLOATS, device=device), torch.empty(COPIED_FLOATS, device=device)
        grid = (COPIED_FLOATS // 256, 1, 1)

        def launch_nothing() -> torch.Tensor:
            nothing((1, 1, 1), 32)
            return target

        def launch_copy() -> torch.Tensor:
            copy(grid, 256, source=source, target=target, count=COPIED_FLOATS)
            return target

        yield "launch in a graph, empty kernel", time_calls([launch_nothing] * GRAPH_KERNELS, device)
        yield "launch in a graph, kernel that copies 4 KB", time_calls([launch_copy] * GRAPH_KERNELS, device)
        yield "launch from Python, empty kernel", time_eager(launch_nothing)
        yield "launch from Python, three arguments", time_eager(launch_copy)
    weight = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    x = torch.randn(1, 64, device=device, dtype=torch.bfloat16)
    # The baseline's kernel is F.linear: the calls over it add only their overhead.
    packed = get_format(BASELINE).pack(weight, NO_ZEROS)
    operands = [packed.tensors[name] for name in sorted(packed.tensors)]
    module = SparseLinear(packed)
    with torch.inference_mode():
        yield "call from Python, torch F.linear", time_eager(lambda: F.linear(x, weight))
        yield "call from Python, semisparse.linear over it", time_eager(lambda: linear(x, packed))
        yield "call from Python, SparseLinear over it", time_eager(lambda: module(x))
        operator = torch.ops.semisparse.linear
        yield (
            "call from Python, traced operator",
            time_eager(lambda: operator(x, operands, None, packed.spec.json, "auto")),
        )

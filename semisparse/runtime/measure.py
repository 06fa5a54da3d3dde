"""Rates measured on the device at hand: read bandwidth and matrix product peaks, kept in the user's cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.runtime.cache import cached
from semisparse.runtime.device import DeviceFacts, device_facts

MEASUREMENT = 3
"""Raise it when what is measured changes: kept figures of another number are measured anew."""

REPEATS = 9


@dataclass(frozen=True)
class Rates:
    """What a device was seen to reach.

    Args:
        read_bandwidth: bytes a second, summing an array far larger than the cache.
        peaks: operations a second of a large dense product, by unit (``tensor fp16``, ``fp32``, ...).
    """

    read_bandwidth: float
    peaks: dict[str, float]


def measured_rates(device: torch.device | str) -> Rates:
    """Measure a device's rates, or read what an earlier process measured (about two seconds on a GPU)."""
    device = torch.device(device)
    facts = device_facts(device)
    key = json.dumps({"measurement": MEASUREMENT, **asdict(facts)}, sort_keys=True).encode()
    stored = cached("rates", key, lambda: json.dumps(asdict(_measure(device, facts))).encode())
    return Rates(**json.loads(stored))


def _measure(device: torch.device, facts: DeviceFacts) -> Rates:
    side = 8192 if facts.kind == "cuda" else 1024
    peaks = {unit: 2 * side**3 / _seconds(product, device) for unit, product in _products(device, side).items()}
    if "tensor fp8" in peaks:
        # torch's int8 product is weak on Hopper (875 of 1,324 T(FL)OP/s on an H200), whose int8 is as fast as its fp8.
        peaks["tensor int8"] = max(peaks["tensor int8"], peaks["tensor fp8"])
    return Rates(_read_bandwidth(device, facts), peaks)


def _read_bandwidth(device: torch.device, facts: DeviceFacts) -> float:
    size = min(4 << 30, facts.memory_bytes // 8) if facts.kind == "cuda" else 1 << 29
    values = torch.ones(size // 4, dtype=torch.float32, device=device)
    return values.numel() * 4 / _seconds(values.sum, device)


def _products(device: torch.device, side: int) -> dict[str, Callable[[], Tensor]]:
    """Large dense products by the unit that computes them; random data, since zeros run faster than real weights.

    As layers multiply, by a weight's rows: without bfloat16 in hardware a CPU is 17 times slower by columns.
    """
    x = torch.randn(side, side, device=device)
    half = x.bfloat16()
    products = {"tensor fp16": lambda: F.linear(half, half), "fp32": lambda: F.linear(x, x)}
    if device.type == "cuda":
        int8 = (x * 40).to(torch.int8)
        products["tensor int8"] = lambda: torch._int_mm(int8, int8.t())
        if torch.cuda.get_device_capability(device) >= (8, 9):
            fp8, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
            products["tensor fp8"] = lambda: torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
    return products


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Median seconds of a call, the first two left out."""
    time_once = _seconds_on_gpu if device.type == "cuda" else _seconds_on_cpu
    return median([time_once(call) for _ in range(REPEATS + 2)][2:])


def _seconds_on_gpu(call: Callable[[], Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _seconds_on_cpu(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start

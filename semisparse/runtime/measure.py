"""Rates measured on this machine's devices: read bandwidth and dense matmul peaks. They are cached on disk."""

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
from semisparse.runtime.device import DeviceFacts, cpu_multiplies_int8, device_facts

MEASUREMENT = 4
"""The version of the measurement, part of the cache key. Increment it when the measurement changes."""

REPEATS = 9
"""Timed calls per rate."""


@dataclass(frozen=True)
class Rates:
    """The measured rates of a device.

    Args:
        read_bandwidth: bytes per second, from summing an array far larger than the cache.
        peaks: operations per second of a large dense matmul, by unit (``tensor fp16``, ``fp32``, ...).
    """

    read_bandwidth: float
    peaks: dict[str, float]


def measured_rates(device: torch.device | str) -> Rates:
    """Return a device's rates, cached on disk by the device's facts. Measuring takes two seconds on a GPU."""
    device = torch.device(device)
    facts = device_facts(device)
    key = json.dumps({"measurement": MEASUREMENT, **asdict(facts)}, sort_keys=True).encode()
    stored = cached("rates", key, lambda: json.dumps(asdict(_measure(device, facts))).encode())
    return Rates(**json.loads(stored))


def _measure(device: torch.device, facts: DeviceFacts) -> Rates:
    side = 8192 if facts.kind == "cuda" else 1024
    peaks = {unit: 2 * side**3 / _seconds(call, device) for unit, call in _matmuls(device, side).items()}
    if "tensor fp8" in peaks:
        # Hopper's int8 and fp8 peaks are equal, but torch's int8 GEMM reaches 875 TOP/s where fp8 reaches 1,324 (H200).
        peaks["tensor int8"] = max(peaks["tensor int8"], peaks["tensor fp8"])
    return Rates(_read_bandwidth(device, facts), peaks)


def _read_bandwidth(device: torch.device, facts: DeviceFacts) -> float:
    size = min(4 << 30, facts.memory_bytes // 8) if facts.kind == "cuda" else 1 << 29
    values = torch.ones(size // 4, dtype=torch.float32, device=device)
    return values.numel() * 4 / _seconds(values.sum, device)


def _matmuls(device: torch.device, side: int) -> dict[str, Callable[[], Tensor]]:
    """Return dense matmuls ``x @ w.T`` with M = N = K = ``side``, by the unit that computes them.

    The data are random, because zeros run faster than real weights. ``x @ w`` would not do: on a CPU without bfloat16
    instructions it is 17 times slower than ``x @ w.T``, which layers compute.
    """
    x = torch.randn(side, side, device=device)
    half = x.bfloat16()
    calls = {"tensor fp16": lambda: F.linear(half, half), "fp32": lambda: F.linear(x, x)}
    if device.type == "cuda" or cpu_multiplies_int8():
        int8 = (x * 40).to(torch.int8)
        calls["tensor int8"] = lambda: torch._int_mm(int8, int8.t())
    if device_facts(device).capability >= (8, 9):
        fp8, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
        calls["tensor fp8"] = lambda: torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
    return calls


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median seconds of `REPEATS` calls, after two that warm up."""
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

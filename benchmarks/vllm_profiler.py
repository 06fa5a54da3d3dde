"""Torch's profiler in vLLM's worker: the kernels of a decode step, and how long the GPU is busy with requests.

Functions of ``worker`` run in the worker, through the engine's ``collective_rpc``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm_requests import throughput_seconds, token_ids

PROFILED_STEPS, STEP, BUSY = 32, "step", "busy"


@dataclass(frozen=True)
class KernelTime:
    """A row of the profile: a kernel of a decode step of one sequence.

    Args:
        kernel: its name, without template arguments.
        calls: launches per step.
        us: microseconds per step; ``step`` is the time from a step's first kernel to the next step's, ``busy`` that
            in which the GPU runs anything: a slow host lengthens only the first.
    """

    kernel: str
    calls: float
    us: float


@dataclass(frozen=True)
class ProfileRow(KernelTime):
    """A row of the profile's CSV.

    Args:
        model: as in `vllm_engine.Row`.
        weights: as in `vllm_engine.Row`.
        machine: the GPU.
    """

    model: str
    weights: str
    machine: str


@dataclass(frozen=True)
class BusyRow:
    """A row of the CSV of the GPU's share in the throughput: what a faster host could not shorten.

    Args:
        model: as in `vllm_engine.Row`.
        weights: as in `vllm_engine.Row`.
        requests: at once, those of the throughput or `vllm_prompts.LONG_PROMPTS` with one token out each.
        prompt_tokens: of these.
        output_tokens: of these.
        busy_s: seconds in which the GPU ran any kernel or copy for them, by torch's profiler.
        kernels: kernels and copies.
        cache_gib: as in `vllm_engine.Row`.
        machine: as in `vllm_engine.Row`.
        software: as in `vllm_engine.Row`.
    """

    model: str
    weights: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    busy_s: float
    kernels: int
    cache_gib: int
    machine: str
    software: str


def start_profiler(worker: Any) -> None:
    """Profile what the GPU runs from now on."""
    import torch

    worker.benchmark_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.benchmark_profiler.start()


def stop_profiler(worker: Any) -> list[tuple[str, int, float]]:
    """Return name, launches and microseconds of each kernel since `start_profiler`, then `STEP` and `BUSY`."""
    import torch

    torch.cuda.synchronize()
    worker.benchmark_profiler.stop()
    averages = [
        (event.key, event.count, event.self_device_time_total) for event in worker.benchmark_profiler.key_averages()
    ]
    ranges = [event.time_range for event in worker.benchmark_profiler.events() if event.self_device_time_total > 0]
    step = max(each.end for each in ranges) - min(each.start for each in ranges)
    return [*averages, (STEP, 0, step), (BUSY, 0, busy_time(worker)[0] * 1e6)]


def stop_busy(worker: Any) -> tuple[float, int]:
    """Return the seconds in which the GPU ran anything since `start_profiler`, and of how many kernels and copies."""
    import torch

    torch.cuda.synchronize()
    worker.benchmark_profiler.stop()
    return busy_time(worker)


def busy_time(worker: Any) -> tuple[float, int]:
    """Return the seconds in which the GPU ran anything while it was profiled, and of how many kernels and copies."""
    import torch

    events = worker.benchmark_profiler.profiler.kineto_results.events()
    on_gpu = (event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    return covered([(event.start_ns(), event.duration_ns()) for event in on_gpu])


def covered(spans: list[tuple[int, int]]) -> tuple[float, int]:
    """Return the seconds that spans, (start, length) in nanoseconds, cover together, and their number."""
    busy = end = 0
    for start, length in sorted(spans):
        busy += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return busy * 1e-9, len(spans)


def busy_share(engine: Any, model: str, prompts: list[int], outputs: list[int]) -> dict[str, Any]:
    """Return the fields of `BusyRow` for requests of these lengths."""
    engine.collective_rpc(start_profiler)
    throughput_seconds(prompts, outputs, model)
    seconds, kernels = engine.collective_rpc(stop_busy)[0]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "busy_s": round(seconds, 3),
        "kernels": kernels,
    }


def profiled(engine: Any, prompt: list[int], tokens: int) -> tuple[Counter[str], Counter[str]]:
    """Return launches and microseconds per kernel while one sequence is generated."""
    from vllm import SamplingParams

    engine.collective_rpc(start_profiler)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    calls: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for key, count, taken in engine.collective_rpc(stop_profiler)[0]:
        calls[key] += count
        us[key] += taken
    return calls, us


def profile_step(engine: Any) -> list[KernelTime]:
    """Return the kernels of a decode step of one sequence after 512 tokens, the longest first.

    Two generations are profiled, of two tokens and of `PROFILED_STEPS` more, and subtracted.
    """
    prompt = token_ids(512, random.Random(1))
    profiled(engine, prompt, 4)
    (first_calls, first_us), (calls, us) = (profiled(engine, prompt, n) for n in (2, 2 + PROFILED_STEPS))
    calls.update({STEP: PROFILED_STEPS, BUSY: PROFILED_STEPS})
    rows = [
        KernelTime(
            re.sub(r"\s*[<(].*", "", key.removeprefix("void "))[:90],
            round((calls[key] - first_calls[key]) / PROFILED_STEPS, 3),
            round((us[key] - first_us[key]) / PROFILED_STEPS, 2),
        )
        for key in calls
    ]
    return sorted((row for row in rows if row.us > 0), key=lambda row: -row.us)

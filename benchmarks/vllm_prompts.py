"""Long prompts on one engine of vLLM: tokens per second, and every kernel that the GPU runs for them."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_process import Turn
from vllm_profiler import covered, start_profiler
from vllm_requests import throughput_seconds

LONG_PROMPTS, LONG_PROMPT = 32, 2048
LONG = [LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS
"""Lengths of the prompts, in tokens, and of their outputs."""


@dataclass(frozen=True)
class PromptKernelRow:
    """A row of the CSV of what the GPU runs while it reads `LONG_PROMPTS` prompts of `LONG_PROMPT` tokens.

    Args:
        model: as in `vllm_engine.Row`.
        weights: as in `vllm_engine.Row`.
        kernel: its name, cut; ``idle`` is the time between the first kernel and the last in which none ran.
        grid: its thread blocks.
        calls: launches.
        us: their time, summed.
        machine: as in `vllm_engine.Row`.
        software: as in `vllm_engine.Row`.
    """

    model: str
    weights: str
    kernel: str
    grid: str
    calls: int
    us: float
    machine: str
    software: str


def stop_trace(worker: Any, out: str) -> list[tuple[str, str, float, float]]:
    """Return name, grid, start and length in microseconds of all that the GPU ran since `start_profiler`, in order.

    They are also written to ``out``, gzipped.
    """
    import torch

    torch.cuda.synchronize()
    worker.benchmark_profiler.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        worker.benchmark_profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    spans = sorted(
        (event["ts"], event["dur"], event["name"], "x".join(map(str, event["args"].get("grid", []))))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    with gzip.open(out, "wt") as file:
        file.writelines(
            f"{start - spans[0][0]:.1f} {length:.2f} {grid} {name[:300]}\n" for start, length, name, grid in spans
        )
    return [(name[:300], grid, start, length) for start, length, name, grid in spans]


def prompt_kernels(spans: Sequence[tuple[str, str, float, float]]) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds in which any of `stop_trace`'s kernels ran, and the kernels' fields of `PromptKernelRow`."""
    calls: Counter[tuple[str, str]] = Counter()
    us: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, grid, _, length in spans:
        calls[name, grid] += 1
        us[name, grid] += length
    busy = covered([(round(start * 1e3), round(length * 1e3)) for _, _, start, length in spans])[0]
    whole = max(start + length for *_, start, length in spans) - min(start for *_, start, _ in spans)
    rows = [
        {"kernel": name.removeprefix("void ")[:200], "grid": grid, "calls": calls[name, grid], "us": round(taken, 1)}
        for (name, grid), taken in sorted(us.items(), key=lambda item: -item[1])
    ]
    return busy, [*rows, {"kernel": "idle", "grid": "", "calls": 0, "us": round(whole - busy * 1e6, 1)}]


def long_prompt_rate(model: str, runs: int) -> int:
    """Return the prompt tokens per second of the fastest of several runs."""
    return round(LONG_PROMPTS * LONG_PROMPT / min(throughput_seconds(*LONG, model) for _ in range(runs)))


def measure_prompts(turn: Turn, engine: Any, model: str, versions: dict[str, str]) -> None:
    """Send the parent the speed of long prompts, and what the GPU runs for them."""
    turn.say("prompt_tokens_per_second", long_prompt_rate(model, runs=4))
    engine.collective_rpc(start_profiler)
    throughput_seconds(*LONG, model)
    spans = engine.collective_rpc(stop_trace, args=(f"{model}-{os.getpid()}.trace.gz",))[0]
    busy, rows = prompt_kernels(spans)
    share = {"requests": LONG_PROMPTS, "prompt_tokens": LONG_PROMPTS * LONG_PROMPT, "output_tokens": LONG_PROMPTS}
    turn.say("busy", [{**share, "busy_s": round(busy, 4), "kernels": len(spans), **versions}])
    turn.say("prompt_kernels", [{**row, **versions} for row in rows])

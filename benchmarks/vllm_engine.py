"""Measurements of one engine of vLLM by vLLM's own benchmarks: latency, decode steps, throughput, a step's kernels."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LATENCY = {"batch-size": 1, "input-len": 512, "output-len": 128, "num-iters-warmup": 2, "num-iters": 5}
"""Arguments of ``vllm bench latency``."""

BATCHES = (8, 32, 128)
STEPS = {"input-len": 64, "output-len": 64, "num-iters-warmup": 1, "num-iters": 2}
"""The same where decode steps of several sequences are timed: short prompts, so that 128 sequences fit the cache."""

REQUESTS, MEAN_PROMPT, MEAN_OUTPUT, SPREAD, LONGEST = 200, 220, 200, 1.0, 1024
"""Lengths as in ShareGPT: log-normal with these means, deviation ``SPREAD`` of the logarithm, cut at ``LONGEST``."""

LONG_PROMPTS, LONG_PROMPT = 32, 2048

PROFILED_STEPS = 32


@dataclass(frozen=True)
class KernelTime:
    """A row of the profile: a kernel of a decode step of one sequence.

    Args:
        kernel: its name, without template arguments.
        calls: launches per step.
        us: microseconds per step.
    """

    kernel: str
    calls: float
    us: float


def chat_lengths(mean: int, seed: int, count: int = REQUESTS) -> list[int]:
    """Return a length for each request."""
    draw = random.Random(seed)
    drawn = [draw.lognormvariate(0, SPREAD) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [min(LONGEST, max(4, round(scale * each))) for each in drawn]


def token_ids(count: int, draw: random.Random) -> list[int]:
    """Return random token ids."""
    return [draw.randrange(32000) for _ in range(count)]


def requests_of(prompts: list[int], outputs: list[int]) -> list[Any]:
    """Return requests of random tokens with these lengths."""
    from vllm.benchmarks.datasets import SampleRequest

    draw = random.Random(1)
    return [
        SampleRequest({"prompt_token_ids": token_ids(prompt, draw)}, prompt_len=prompt, expected_output_len=output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def throughput_seconds(prompts: list[int], outputs: list[int], model: str) -> float:
    """Return the seconds that ``vllm bench throughput`` takes for requests of these lengths."""
    from vllm.benchmarks.throughput import run_vllm
    from vllm.engine.arg_utils import EngineArgs

    return float(run_vllm(requests_of(prompts, outputs), 1, EngineArgs(model=model), False, disable_detokenize=True)[0])


def latency_seconds(model: str, **arguments: int) -> float:
    """Return the mean seconds per batch of ``vllm bench latency``."""
    from vllm.benchmarks import latency as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    bench.add_cli_args(parser)
    given = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        bench.main(parser.parse_args(["--model", model, *given, "--disable-detokenize", "--output-json", out.name]))
        return float(json.loads(Path(out.name).read_text())["avg_latency"])


def step_ms(model: str, arguments: dict[str, int]) -> tuple[float, float, float]:
    """Return the seconds of whole batches, of their first tokens, and the milliseconds per further token."""
    whole = latency_seconds(model, **arguments)
    first = latency_seconds(model, **{**arguments, "output-len": 1})
    return whole, first, (whole - first) / (arguments["output-len"] - 1) * 1e3


def weight_bytes(worker: Any) -> int:
    """Return the bytes that loading the weights took, of vLLM's worker."""
    return int(worker.model_runner.model_memory_usage)


def _start_profiler(worker: Any) -> None:
    import torch

    worker.benchmark_profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.benchmark_profiler.start()


def _stop_profiler(worker: Any) -> list[tuple[str, int, float]]:
    import torch

    torch.cuda.synchronize()
    worker.benchmark_profiler.stop()
    return [
        (event.key, event.count, event.self_device_time_total) for event in worker.benchmark_profiler.key_averages()
    ]


def _profiled(engine: Any, prompt: list[int], tokens: int) -> tuple[Counter[str], Counter[str]]:
    """Return launches and microseconds per kernel while one sequence is generated."""
    from vllm import SamplingParams

    engine.collective_rpc(_start_profiler)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    calls: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for key, count, time in engine.collective_rpc(_stop_profiler)[0]:
        calls[key] += count
        us[key] += time
    return calls, us


def profile_step(engine: Any) -> list[KernelTime]:
    """Return the kernels of a decode step of one sequence after 512 tokens, the longest first.

    Two generations are profiled, of one token and of `PROFILED_STEPS` more, and subtracted.
    """
    prompt = token_ids(512, random.Random(1))
    _profiled(engine, prompt, 4)
    (first_calls, first_us), (calls, us) = (_profiled(engine, prompt, n) for n in (2, 2 + PROFILED_STEPS))
    rows = [
        KernelTime(
            re.sub(r"\s*[<(].*", "", key.removeprefix("void "))[:90],
            round((calls[key] - first_calls[key]) / PROFILED_STEPS, 3),
            round((us[key] - first_us[key]) / PROFILED_STEPS, 2),
        )
        for key in calls
    ]
    return sorted((row for row in rows if row.calls > 0), key=lambda row: -row.us)

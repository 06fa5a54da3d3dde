"""Measurements of one engine of vLLM by vLLM's own benchmarks: latency, decode steps, throughput, a step's kernels."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_cache import use_shared_cache
from vllm_process import Turn

LATENCY = {"batch-size": 1, "input-len": 512, "output-len": 128, "num-iters-warmup": 1, "num-iters": 4}
"""Arguments of ``vllm bench latency``."""

BATCHES = (8, 32, 128)
STEPS = {"input-len": 64, "output-len": 48, "num-iters-warmup": 1, "num-iters": 1}
"""The same where decode steps of several sequences are timed: short prompts, so that 128 sequences fit the cache."""

MEAN_PROMPT, MEAN_OUTPUT, SPREAD, LONGEST = 220, 200, 1.0, 1024
"""Lengths as in ShareGPT: log-normal with these means, deviation ``SPREAD`` of the logarithm, cut at ``LONGEST``."""

LONG_PROMPTS, LONG_PROMPT = 32, 2048

PROFILED_STEPS, STEP, BUSY = 32, "step", "busy"

UNFUSED = {"additional_config": {"semisparse_fusion": False, "semisparse_attention": False}}
FLASH = {"additional_config": {"semisparse_attention": False}}
FEW_SPLITS = {"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 4}}
ONE_SPLIT = {"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1}}

VARIANTS: dict[str, dict[str, Any]] = {
    "-unfused-few-splits": {**UNFUSED, **FEW_SPLITS},
    "-few-splits": {**FLASH, **FEW_SPLITS},
    "-one-split": {**FLASH, **ONE_SPLIT},
    "-flash-attention": FLASH,
    "-unfused": UNFUSED,
    "-16k": {"max_num_batched_tokens": 16384},
    "-triton-attention": {"attention_config": {"backend": "TRITON_ATTN"}},
    "-keep-dense": {"additional_config": {"semisparse_keep_dense": ["*"]}},
}
"""Endings of columns, and the engine arguments that they stand for: FlashAttention takes the keys in at most 4 parts
instead of 32, without and with fused matmuls; the keys in one part, so that no kernel combines parts; FlashAttention
for one and two sequences too; that, and no fused matmuls; 16,384 tokens per step; vLLM's own kernel for attention;
dense copies of all weights."""

WHOLE = ("", "-keep-dense")
"""Endings of the columns of which prompts and throughput are measured too; the others do not change these."""

ENGINE: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
}
"""Engine arguments of every column. 8,192 tokens per step are the default of ``vllm serve`` on this GPU, 16,384 that of
``vllm.LLM``: with one of them, a server finds the graphs that an engine compiled. The cache's size is given, because
several engines share the GPU."""


@dataclass(frozen=True)
class Row:
    """A row of the CSV: one way to store the weights. What was not measured is empty.

    Args:
        model: the model whose shapes the layers have.
        layers: decoder layers.
        weights: the column's name.
        weight_gib: GPU memory that loading the weights took, as vLLM measures it.
        start_s: seconds until the engine took requests, while the other engines started.
        latency_s: of `LATENCY`, `vllm bench latency`: 512 tokens in, 128 out, batch 1.
        first_token_s: the same with one token out.
        step_ms: the time per token between the two.
        step_ms_8: the time per step of 8 sequences, 64 tokens in and 64 out.
        step_ms_32: of 32.
        step_ms_128: of 128.
        prompt_tokens_per_second: of `LONG_PROMPTS` prompts of `LONG_PROMPT` tokens, one token out each; the faster of
            two runs.
        requests: at once, `vllm bench throughput`.
        requests_per_second: of these.
        output_tokens_per_second: of these.
        cache_gib: of the KV cache.
        machine: the GPU.
        software: versions.
    """

    model: str
    layers: int
    weights: str
    weight_gib: float
    start_s: float
    latency_s: float
    first_token_s: float
    step_ms: float
    step_ms_8: float | None
    step_ms_32: float | None
    step_ms_128: float | None
    prompt_tokens_per_second: int | None
    requests: int | None
    requests_per_second: float | None
    output_tokens_per_second: int | None
    cache_gib: int
    machine: str
    software: str


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
        model: as in `Row`.
        weights: as in `Row`.
        machine: the GPU.
    """

    model: str
    weights: str
    machine: str


@dataclass(frozen=True)
class BusyRow:
    """A row of the CSV of the GPU's share in the throughput: what a faster host could not shorten.

    Args:
        model: as in `Row`.
        weights: as in `Row`.
        requests: at once, those of the throughput or `LONG_PROMPTS` with one token out each.
        prompt_tokens: of these.
        output_tokens: of these.
        busy_s: seconds in which the GPU ran any kernel or copy for them, by torch's profiler.
        kernels: kernels and copies.
        cache_gib: as in `Row`.
        machine: as in `Row`.
        software: as in `Row`.
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


@dataclass(frozen=True)
class PromptKernelRow:
    """A row of the CSV of what the GPU runs while it reads `LONG_PROMPTS` prompts of `LONG_PROMPT` tokens.

    Args:
        model: as in `Row`.
        weights: as in `Row`.
        kernel: its name, cut; ``idle`` is the time between the first kernel and the last in which none ran.
        grid: its thread blocks.
        calls: launches.
        us: their time, summed.
        machine: as in `Row`.
        software: as in `Row`.
    """

    model: str
    weights: str
    kernel: str
    grid: str
    calls: int
    us: float
    machine: str
    software: str


def chat_lengths(mean: int, seed: int, count: int) -> list[int]:
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
    averages = [
        (event.key, event.count, event.self_device_time_total) for event in worker.benchmark_profiler.key_averages()
    ]
    ranges = [event.time_range for event in worker.benchmark_profiler.events() if event.self_device_time_total > 0]
    step = max(each.end for each in ranges) - min(each.start for each in ranges)
    return [*averages, (STEP, 0, step), (BUSY, 0, _busy(worker)[0] * 1e6)]


def _stop_busy(worker: Any) -> tuple[float, int]:
    """Return the seconds in which the GPU ran anything since `_start_profiler`, and of how many kernels and copies."""
    import torch

    torch.cuda.synchronize()
    worker.benchmark_profiler.stop()
    return _busy(worker)


def _busy(worker: Any) -> tuple[float, int]:
    """Return the seconds in which the GPU ran anything while it was profiled, and of how many kernels and copies."""
    import torch

    events = worker.benchmark_profiler.profiler.kineto_results.events()
    on_gpu = (event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    return _union([(event.start_ns(), event.duration_ns()) for event in on_gpu])


def _union(spans: list[tuple[int, int]]) -> tuple[float, int]:
    """Return the seconds that spans, (start, length) in nanoseconds, cover together, and their number."""
    busy = end = 0
    for start, length in sorted(spans):
        busy += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return busy * 1e-9, len(spans)


def _stop_trace(worker: Any, out: str) -> list[tuple[str, str, float, float]]:
    """Return name, grid, start and length in microseconds of all that the GPU ran since `_start_profiler`, in order.

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
    """Return the seconds in which any of `_stop_trace`'s kernels ran, and the kernels' fields of `PromptKernelRow`."""
    calls: Counter[tuple[str, str]] = Counter()
    us: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, grid, _, length in spans:
        calls[name, grid] += 1
        us[name, grid] += length
    busy = _union([(round(start * 1e3), round(length * 1e3)) for _, _, start, length in spans])[0]
    whole = max(start + length for *_, start, length in spans) - min(start for *_, start, _ in spans)
    rows = [
        {"kernel": name.removeprefix("void ")[:200], "grid": grid, "calls": calls[name, grid], "us": round(taken, 1)}
        for (name, grid), taken in sorted(us.items(), key=lambda item: -item[1])
    ]
    return busy, [*rows, {"kernel": "idle", "grid": "", "calls": 0, "us": round(whole - busy * 1e6, 1)}]


def measure_prompts(turn: Turn, engine: Any, model: str, versions: dict[str, str]) -> None:
    """Send the parent the speed of long prompts, and what the GPU runs for them."""
    prompts = [LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS
    long = min(throughput_seconds(*prompts, model) for _ in range(4))
    turn.say("prompt_tokens_per_second", round(LONG_PROMPTS * LONG_PROMPT / long))
    engine.collective_rpc(_start_profiler)
    throughput_seconds(*prompts, model)
    spans = engine.collective_rpc(_stop_trace, args=(f"{model}-{os.getpid()}.trace.gz",))[0]
    busy, rows = prompt_kernels(spans)
    share = {"requests": LONG_PROMPTS, "prompt_tokens": LONG_PROMPTS * LONG_PROMPT, "output_tokens": LONG_PROMPTS}
    turn.say("busy", [{**share, "busy_s": round(busy, 4), "kernels": len(spans), **versions}])
    turn.say("prompt_kernels", [{**row, **versions} for row in rows])


def busy_share(engine: Any, model: str, prompts: list[int], outputs: list[int]) -> dict[str, Any]:
    """Return the fields of `BusyRow` for requests of these lengths."""
    engine.collective_rpc(_start_profiler)
    throughput_seconds(prompts, outputs, model)
    seconds, kernels = engine.collective_rpc(_stop_busy)[0]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "busy_s": round(seconds, 3),
        "kernels": kernels,
    }


def _profiled(engine: Any, prompt: list[int], tokens: int) -> tuple[Counter[str], Counter[str]]:
    """Return launches and microseconds per kernel while one sequence is generated."""
    from vllm import SamplingParams

    engine.collective_rpc(_start_profiler)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    calls: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for key, count, taken in engine.collective_rpc(_stop_profiler)[0]:
        calls[key] += count
        us[key] += taken
    return calls, us


def profile_step(engine: Any) -> list[KernelTime]:
    """Return the kernels of a decode step of one sequence after 512 tokens, the longest first.

    Two generations are profiled, of one token and of `PROFILED_STEPS` more, and subtracted.
    """
    prompt = token_ids(512, random.Random(1))
    _profiled(engine, prompt, 4)
    (first_calls, first_us), (calls, us) = (_profiled(engine, prompt, n) for n in (2, 2 + PROFILED_STEPS))
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


def measure_engine(
    turn: Turn,
    folder: Path,
    settings: dict[str, Any],
    cache: Any,
    requests: int,
    profiles: bool,
    batches: Sequence[int] = BATCHES,
    busy: int = 0,
    prompts_alone: bool = False,
) -> None:
    """Start an engine and, at its turn, measure; each figure is sent to the parent when it is known.

    Args:
        turn: the connection to the parent.
        folder: the checkpoint.
        settings: of the engine.
        cache: what opens the KV cache.
        requests: of the throughput; 0: neither prompts nor throughput are measured.
        profiles: whether a decode step is profiled.
        batches: numbers of sequences, beside one, of which decode steps are timed.
        busy: requests of a throughput of which the GPU's share is measured, and that of long prompts; 0: it is not.
        prompts_alone: long prompts are measured, kernel by kernel, and nothing else.
    """
    turn.wait()
    import torch
    import vllm

    use_shared_cache(cache)
    model, started = str(folder), time.perf_counter()
    engine = vllm.LLM(model, skip_tokenizer_init=True, **settings)
    start_s = time.perf_counter() - started
    vllm.LLM.from_engine_args = classmethod(lambda cls, engine_args: engine)  # both benchmarks use this engine
    turn.say("ready")
    turn.wait()
    row = {
        "weight_gib": round(engine.collective_rpc(weight_bytes)[0] / 2**30, 2),
        "start_s": round(start_s, 1),
        "machine": torch.cuda.get_device_name(),
        "software": f"vllm {vllm.__version__}, torch {torch.__version__}",
    }
    turn.say("row", row)
    if prompts_alone:
        measure_prompts(turn, engine, model, {"software": row["software"], "machine": row["machine"]})
        turn.say("done")
        return
    whole, first, single = step_ms(model, LATENCY)
    turn.say("latency_s", round(whole, 4))
    turn.say("first_token_s", round(first, 4))
    turn.say("step_ms", round(single, 3))
    for batch in batches:
        turn.say(f"step_ms_{batch}", round(step_ms(model, {**STEPS, "batch-size": batch})[2], 3))
    if requests:
        long = min(throughput_seconds([LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS, model) for _ in range(2))
        turn.say("prompt_tokens_per_second", round(LONG_PROMPTS * LONG_PROMPT / long))
        outputs = chat_lengths(MEAN_OUTPUT, 2, requests)
        chat = throughput_seconds(chat_lengths(MEAN_PROMPT, 1, requests), outputs, model)
        turn.say("requests", requests)
        turn.say("requests_per_second", round(requests / chat, 2))
        turn.say("output_tokens_per_second", round(sum(outputs) / chat))
    if profiles:
        turn.say("profile", [asdict(each) for each in profile_step(engine)])
    if busy:
        prompts = [LONG_PROMPT] * LONG_PROMPTS, [1] * LONG_PROMPTS
        throughput_seconds(*prompts, model)  # what is loaded or compiled at its first use is not measured
        chats = chat_lengths(MEAN_PROMPT, 1, busy), chat_lengths(MEAN_OUTPUT, 2, busy)
        versions = {"software": row["software"], "machine": row["machine"]}
        turn.say("busy", [{**busy_share(engine, model, *lengths), **versions} for lengths in (prompts, chats)])
    turn.say("done")

"""Measurements of one engine of vLLM by vLLM's own benchmarks: latency, decode steps, throughput."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_cache import use_shared_cache
from vllm_process import Turn
from vllm_profiler import busy_share, profile_step
from vllm_prompts import LONG, long_prompt_rate, measure_prompts
from vllm_requests import MEAN_OUTPUT, MEAN_PROMPT, chat_lengths, throughput_seconds

LATENCY = {"batch-size": 1, "input-len": 512, "output-len": 128, "num-iters-warmup": 1, "num-iters": 4}
"""Arguments of ``vllm bench latency``."""

BATCHES = (8, 32, 128)
STEPS = {"input-len": 64, "output-len": 48, "num-iters-warmup": 1, "num-iters": 1}
"""The same where decode steps of several sequences are timed: short prompts, so that 128 sequences fit the cache."""

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
        turn.say("prompt_tokens_per_second", long_prompt_rate(model, runs=2))
        outputs = chat_lengths(MEAN_OUTPUT, 2, requests)
        chat = throughput_seconds(chat_lengths(MEAN_PROMPT, 1, requests), outputs, model)
        turn.say("requests", requests)
        turn.say("requests_per_second", round(requests / chat, 2))
        turn.say("output_tokens_per_second", round(sum(outputs) / chat))
    if profiles:
        turn.say("profile", [asdict(each) for each in profile_step(engine)])
    if busy:
        throughput_seconds(*LONG, model)  # what is loaded or compiled at its first use is not measured
        chats = chat_lengths(MEAN_PROMPT, 1, busy), chat_lengths(MEAN_OUTPUT, 2, busy)
        versions = {"software": row["software"], "machine": row["machine"]}
        turn.say("busy", [{**busy_share(engine, model, *lengths), **versions} for lengths in (LONG, chats)])
    turn.say("done")

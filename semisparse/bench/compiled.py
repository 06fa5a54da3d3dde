"""Measuring a rank's part of a model through transformers' own code, its decode step compiled and captured."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, StaticCache

from semisparse.bench.model import REPEATS, ModelSpeed, Workload
from semisparse.errors import InputError
from semisparse.runtime.device import device_facts

WARM_STEPS = 3


@torch.no_grad()
def measure_rank(model: PreTrainedModel, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure prompts, decode and memory of this rank's part.

    Args:
        model: on its device.
        name: of the model, for the table.
        weights: what its linear layers are, for the table.
        workload: how many tokens.
    Raises:
        InputError: the model's context is too short for it.
    """
    device = model.device
    room = _check_context(model, workload)
    facts = device_facts(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (workload.batch, workload.prompt), generator=generator).to(device)
    first_token = _prefill_seconds(model, prompt)
    step = _decode_seconds(model, prompt, workload.new, room)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return ModelSpeed(
        model=name,
        weights=weights,
        batch=workload.batch,
        prompt=workload.prompt,
        first_token_ms=first_token * 1e3,
        prefill_tokens_per_second=prompt.numel() / first_token,
        decode_ms=step * 1e3,
        decode_tokens_per_second=workload.batch / step,
        weight_gb=sum(_bytes_here(parameter) for parameter in model.parameters()) / 1e9,
        peak_gb=peak / 1e9,
        machine=facts.name,
        software=facts.driver,
    )


def _check_context(model: PreTrainedModel, workload: Workload) -> int:
    """Give the cache's length; the repeats of decode follow one another in it."""
    room = workload.prompt + WARM_STEPS + 1 + (REPEATS + 1) * workload.new
    context = getattr(model.config, "max_position_embeddings", room)
    if room > context:
        raise InputError(
            f"the model's context is {context} tokens; a prompt of {workload.prompt} and {REPEATS + 1} repeats of "
            f"{workload.new} new ones need {room}: ask for fewer"
        )
    return room


def _bytes_here(parameter: Tensor) -> int:
    """Count the bytes of a parameter that this device holds, of one that is spread over several, too."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _prefill_seconds(model: PreTrainedModel, prompt: Tensor) -> float:
    def prefill() -> None:
        model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    prefill()
    return median(_elapsed(prefill, model.device) for _ in range(REPEATS))


def _decode_seconds(model: PreTrainedModel, prompt: Tensor, new: int, room: int) -> float:
    """Time decode steps in a static cache, as a replayed CUDA graph on a GPU; the token stays on the device."""
    on_gpu = model.device.type == "cuda"
    cache = StaticCache(config=model.config, max_cache_len=room)
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    forward = torch.compile(model.__call__, dynamic=False) if on_gpu else model

    def step() -> None:
        token.copy_(forward(token, past_key_values=cache).logits.argmax(-1))

    run = _captured(step) if on_gpu else step

    def generate() -> None:
        for _ in range(new):
            run()

    generate()
    return median(_elapsed(generate, model.device) for _ in range(REPEATS)) / new


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # A thread of NCCL's, where a model is spread over GPUs, may go on asking for events while this one is captured.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _elapsed(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

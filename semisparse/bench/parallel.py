"""`semisparse bench parallel`: a model with random weights over several devices, by transformers' tensor parallelism.

Every rank runs its shard in transformers' own code. On a GPU the decode step is compiled and captured in a CUDA graph.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from semisparse.bench.model import (
    REPEATS,
    ModelSpeed,
    Workload,
    measure_each,
    model_speed,
    random_layers,
    random_prompts,
    reset_peak_memory,
)
from semisparse.bench.roofline import Candidate
from semisparse.bench.shapes import architecture
from semisparse.errors import InputError
from semisparse.nn import join_layers

WARM_STEPS = 3
"""Decode steps that run before one is captured in a CUDA graph."""


def ranks() -> int:
    """Return the number of processes that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which reports."""
    return int(os.environ.get("RANK", "0")) == 0


def measure_parallel(
    name: str, dtype: torch.dtype, device: torch.device, candidates: Iterable[Candidate | None], workload: Workload
) -> Iterator[ModelSpeed]:
    """Measure an architecture over all ranks, once per candidate. Sizes in GB are those of one rank.

    Args:
        name: the architecture, a name in `ARCHITECTURES`.
        dtype: dtype of weights and activations.
        device: this rank's device.
        candidates: how every linear layer but the head is stored; None for transformers' dense layers.
        workload: the numbers of sequences and tokens.
    Raises:
        InputError: the architecture is unknown, a layer cannot be sliced, or the context is too short.
        FormatError: a format cannot store a layer.
    """
    for speed in measure_each(partial(parallel_model, name, dtype, device), name, candidates, [workload], measure_rank):
        yield replace(speed, machine=f"{ranks()} x {speed.machine}")


def parallel_model(name: str, dtype: torch.dtype, device: torch.device, candidate: Candidate | None) -> PreTrainedModel:
    """Build this rank's shard of an architecture with random weights, as loading a checkpoint would.

    Args:
        name: the architecture, a name in `ARCHITECTURES`.
        dtype: dtype of weights and activations.
        device: where random weights are drawn and packed.
        candidate: how every linear layer but the head is stored; None for transformers' dense layers.
    Raises:
        InputError: the architecture is unknown, or a layer cannot be sliced.
        FormatError: the format cannot store a layer.
    """
    from transformers.distributed import DistributedConfig

    config = architecture(name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state: dict[str, Tensor] = {}
    if candidate is not None:
        packed = random_layers(skeleton, candidate, dtype, device)
        layers: dict[str, Any] = {layer: weight.spec.to_dict() for layer, weight in packed.items()}
        config.quantization_config = {"quant_method": "semisparse", "version": 1, "layers": layers}
        state = {f"{layer}.{key}": tensor for layer, w in packed.items() for key, tensor in w.tensors.items()}
    distributed = DistributedConfig(tp_plan="auto")
    model = type(skeleton).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, distributed_config=distributed
    )
    if device.type == "cuda":
        join_layers(model)
    return model.eval()


@torch.no_grad()
def measure_rank(model: PreTrainedModel, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure time to first token, decode and memory of this rank's shard.

    Args:
        model: the shard, on its device.
        name: the model's name in the table.
        weights: the name of its linear layers' storage in the table.
        workload: the numbers of sequences and tokens.
    Raises:
        InputError: the model's context is too short for the workload.
    """
    length = _cache_length(model, workload)
    reset_peak_memory(model.device)
    prompt = random_prompts(model.config.vocab_size, workload).to(model.device)
    first_token = _prefill_seconds(model, prompt)
    step = _decode_seconds(model, prompt, workload.new, length)
    return model_speed(model, name, weights, workload, first_token, step)


def _cache_length(model: PreTrainedModel, workload: Workload) -> int:
    """Return the positions that the static cache needs. The repeats of decode continue one sequence.

    Raises:
        InputError: the model's context is shorter.
    """
    length = workload.prompt + WARM_STEPS + 1 + (REPEATS + 1) * workload.new
    context = getattr(model.config, "max_position_embeddings", length)
    if length > context:
        raise InputError(
            f"the model's context is {context} tokens; a prompt of {workload.prompt} and {REPEATS + 1} repeats of "
            f"{workload.new} new ones need {length}: ask for fewer"
        )
    return length


def _prefill_seconds(model: PreTrainedModel, prompt: Tensor) -> float:
    def prefill() -> None:
        model(prompt, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    prefill()
    return median(_elapsed(prefill, model.device) for _ in range(REPEATS))


def _decode_seconds(model: PreTrainedModel, prompt: Tensor, new: int, length: int) -> float:
    """Return the seconds per decode step with a static cache. On a GPU the step is a replayed CUDA graph."""
    on_gpu = model.device.type == "cuda"
    cache = StaticCache(config=model.config, max_cache_len=length)
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
    """Run a step `WARM_STEPS` times, capture it in a CUDA graph, and return the graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread may query events during the capture, which the default mode, global, forbids.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
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

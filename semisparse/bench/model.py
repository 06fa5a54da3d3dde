"""`semisparse bench model`: prefill and decode speed and memory of a whole model, dense beside compressed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, StaticCache

from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import architecture
from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format
from semisparse.nn import is_linear, join_layers, replace_linear, weight_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

REPEATS = 5

WARM_STEPS = 3


@dataclass(frozen=True)
class Workload:
    """What is generated: ``batch`` prompts of ``prompt`` random tokens, then ``new`` tokens each, one at a time."""

    batch: int = 1
    prompt: int = 512
    new: int = 128


@dataclass(frozen=True)
class ModelSpeed:
    """How fast a model runs a workload; one line of the CSV.

    ``first_token_ms`` is the prefill with the first token, eager; ``decode_ms`` a step of one token for the whole
    batch, on a GPU compiled and in a CUDA graph, as transformers' ``generate`` runs it with a static cache;
    ``weight_gb`` every parameter on this device; ``peak_gb`` the most that it held, 0 on a CPU.
    """

    model: str
    weights: str
    batch: int
    prompt: int
    first_token_ms: float
    prefill_tokens_per_second: float
    decode_ms: float
    decode_tokens_per_second: float
    weight_gb: float
    peak_gb: float
    machine: str
    software: str


def load_model(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint, dense or compressed; on a GPU its layers are joined.

    Raises:
        InputError: it is no model directory.
    """
    if not (directory / "config.json").is_file():
        raise InputError(f"{directory} is no model directory: it has no config.json")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", trust_remote_code=False).eval()
    if device.type == "cuda":
        join_layers(model)
    return model.to(device)


def random_model(name: str, dtype: torch.dtype, device: torch.device, candidate: Candidate | None) -> PreTrainedModel:
    """Build a named architecture with random weights, straight on the device.

    Args:
        name: of the architecture.
        dtype: of weights and activations.
        device: where it is built.
        candidate: what every linear layer but the head is stored as; None leaves the model as transformers has it.
    Raises:
        InputError: there is no architecture of that name.
        FormatError: the format cannot store a layer.
    """
    config: PretrainedConfig = architecture(name)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if candidate is not None:
        make_sparse(model, candidate)
        if device.type == "cuda":
            join_layers(model)
    return model


def make_sparse(model: PreTrainedModel, candidate: Candidate) -> None:
    """Put random packed weights in the place of every linear layer but the head.

    Layers of one shape get copies of one weight: what is read is what counts, not what it says.

    Raises:
        FormatError: the format cannot store a layer.
    """
    pattern = parse_pattern(candidate.pattern)
    packed_by_shape: dict[tuple[int, ...], Packed] = {}
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if is_linear(module) and module is not head]
    for name in names:
        weight = weight_of(model.get_submodule(name))
        n, k = weight.shape
        if (n, k) not in packed_by_shape:
            drawn = random_weight(pattern, n, k, weight.dtype, weight.device)
            packed_by_shape[n, k] = get_format(candidate.format).pack(drawn, pattern, **candidate.options)
        packed = packed_by_shape[n, k]
        replace_linear(model, name, Packed(packed.spec, {key: t.clone() for key, t in packed.tensors.items()}))


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


def measure_each(
    build: Callable[[Candidate | None], PreTrainedModel],
    name: str,
    chosen: Iterable[Candidate | None],
    workload: Workload,
) -> Iterator[ModelSpeed]:
    """Measure a model once for each candidate, one of them in memory at a time; None is the model without semisparse.

    Raises:
        InputError: the model's context is too short for the workload.
    """
    for candidate in chosen:
        model = build(candidate)
        yield measure_model(model, name, _weights_of(candidate, model.device), workload)
        del model
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _weights_of(candidate: Candidate | None, device: torch.device) -> str:
    """Name what a model's linear layers are, so that dense ones that semisparse stores are told from transformers'."""
    if candidate is None:
        return "dense"
    stored = "joined" if device.type == "cuda" else "stored"
    return f"{candidate.label} {stored}" if candidate.is_baseline else candidate.label


@torch.no_grad()
def measure_model(model: PreTrainedModel, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure prefill, decode and memory.

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

"""`semisparse bench model`: prefill, decode and memory of a whole model, dense beside compressed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import architecture
from semisparse.bench.timing import clone
from semisparse.engine import Engine, Sampling
from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format
from semisparse.nn import is_linear, replace_linear, weight_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

REPEATS = 5
"""Timed runs of a workload, after one that compiles and captures."""


@dataclass(frozen=True)
class Workload:
    """The work that is timed: ``batch`` prompts of ``prompt`` random tokens, then ``new`` decode steps."""

    batch: int = 1
    prompt: int = 512
    new: int = 128


@dataclass(frozen=True)
class ModelSpeed:
    """The speed of a model on a workload: a line of the CSV.

    ``first_token_ms`` is the time to the first token; ``decode_ms`` the time per decode step of the whole batch;
    ``weight_gb`` the size of all parameters on this device; ``peak_gb`` the most memory in use, 0 on a CPU.
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


def random_model(
    name: str, dtype: torch.dtype, device: torch.device, candidate: Candidate | None, layers: int | None = None
) -> PreTrainedModel:
    """Build an architecture with random weights on a device.

    Args:
        name: the architecture, a name in `ARCHITECTURES`.
        dtype: dtype of weights and activations.
        device: where the weights are allocated.
        candidate: how every linear layer but the head is stored; None for transformers' dense layers.
        layers: decoder layers, instead of all.
    Raises:
        InputError: the architecture is unknown.
        FormatError: the format cannot store a layer.
    """
    config = architecture(name)
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if candidate is not None:
        make_sparse(model, candidate)
    return model


def make_sparse(model: PreTrainedModel, candidate: Candidate) -> None:
    """Replace every linear layer but the head by random packed weights.

    Raises:
        FormatError: the format cannot store a layer.
    """
    for name, packed in random_layers(model, candidate, model.dtype, model.device).items():
        replace_linear(model, name, clone(packed))


def random_layers(
    model: PreTrainedModel, candidate: Candidate, dtype: torch.dtype, device: torch.device
) -> dict[str, Packed]:
    """Return a random packed weight for every linear layer but the head, by module name.

    Layers of one shape share one weight: its values do not change the time that reading it takes.

    Args:
        model: the model, which may be on the meta device.
        candidate: the format, pattern and options.
        dtype: dtype of the weights.
        device: where they are drawn and packed.
    Raises:
        FormatError: the format cannot store a layer.
    """
    pattern, head = parse_pattern(candidate.pattern), model.get_output_embeddings()
    by_shape: dict[tuple[int, ...], Packed] = {}
    layers = {}
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            n, k = weight_of(module).shape
            if (n, k) not in by_shape:
                weight = random_weight(pattern, n, k, dtype, device)
                by_shape[n, k] = get_format(candidate.format).pack(weight, pattern, **candidate.options)
            layers[name] = by_shape[n, k]
    return layers


def measure_each(
    build: Callable[[Candidate | None], PreTrainedModel],
    name: str,
    candidates: Iterable[Candidate | None],
    workloads: Sequence[Workload],
    measure: Callable[[PreTrainedModel, str, str, Workload], ModelSpeed],
) -> Iterator[ModelSpeed]:
    """Measure a model once per candidate and workload, with one model in memory at a time.

    Args:
        build: returns the model for a candidate.
        name: the model's name in the table.
        candidates: how the linear layers are stored; None for transformers' dense layers.
        workloads: the numbers of sequences and tokens.
        measure: called with the model, its name, its weights' name and the workload.
    Raises:
        InputError: the model's context is too short for the workload.
    """
    for candidate in candidates:
        model = build(candidate)
        for workload in workloads:
            yield measure(model, name, _weights_label(candidate, model.device), workload)
        del model
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _weights_label(candidate: Candidate | None, device: torch.device) -> str:
    """Name a candidate in the table. Dense layers stored by semisparse get another name than transformers' own."""
    if candidate is None:
        return "dense"
    suffix = "joined" if device.type == "cuda" else "stored"
    return f"{candidate.label} {suffix}" if candidate.is_baseline else candidate.label


def measure_in_engine(model: PreTrainedModel, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure a model in memory as `measure_model` does."""
    return measure_model(Engine(model), name, weights, workload)


def measure_model(engine: Engine, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure time to first token, decode and memory, as `semisparse generate` runs them.

    Args:
        engine: contains the model.
        name: the model's name in the table.
        weights: the name of its linear layers' storage in the table.
        workload: the numbers of sequences and tokens.
    Raises:
        InputError: the model's context is too short for the workload.
    """
    if workload.prompt + workload.new > engine.backend.context:
        raise InputError(
            f"the model's context is {engine.backend.context} tokens; a prompt of {workload.prompt} and {workload.new} "
            f"new ones need {workload.prompt + workload.new}: ask for fewer"
        )
    reset_peak_memory(engine.model.device)
    prompts = random_prompts(engine.backend.vocabulary, workload).tolist()
    engine.backend.compile(prompts, workload.new, 0)
    times = [_times(engine, prompts, workload.new) for _ in range(REPEATS + 1)][1:]  # the first compiles and captures
    first_token, step = (median(column) for column in zip(*times, strict=True))
    return model_speed(engine.model, name, weights, workload, first_token, step)


def _times(engine: Engine, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Return the seconds to the first token of a batch, and per later decode step."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    start = time.perf_counter()
    first = last = 0.0
    for _ in engine.backend.run(prompts, new, Sampling()):
        last = time.perf_counter() - start
        first = first or last
    return first, (last - first) / max(new - 1, 1)


def random_prompts(vocabulary: int, workload: Workload) -> Tensor:
    """Return random token ids [batch, prompt], int64 on the CPU, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (workload.batch, workload.prompt), generator=generator)


def reset_peak_memory(device: torch.device) -> None:
    """Reset a GPU's statistic of the most memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def model_speed(
    model: PreTrainedModel, name: str, weights: str, workload: Workload, first_token: float, step: float
) -> ModelSpeed:
    """Return a line of the CSV, with the model's size and the most memory in use since `reset_peak_memory`.

    Args:
        model: the model.
        name: its name in the table.
        weights: the name of its linear layers' storage in the table.
        workload: the numbers of sequences and tokens.
        first_token: seconds to the first token of the batch.
        step: seconds per decode step; 0 if there was none.
    """
    facts = device_facts(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else 0
    return ModelSpeed(
        model=name,
        weights=weights,
        batch=workload.batch,
        prompt=workload.prompt,
        first_token_ms=first_token * 1e3,
        prefill_tokens_per_second=workload.batch * workload.prompt / first_token,
        decode_ms=step * 1e3,
        decode_tokens_per_second=workload.batch / step if step else 0.0,
        weight_gb=sum(_local_bytes(parameter) for parameter in model.parameters()) / 1e9,
        peak_gb=peak / 1e9,
        machine=facts.name,
        software=facts.driver,
    )


def _local_bytes(parameter: Tensor) -> int:
    """Return a parameter's bytes on this device: for a `DTensor`, those of the local shard."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()

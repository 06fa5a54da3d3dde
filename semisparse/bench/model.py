"""`semisparse bench model`: speed of prompts and of decode, and memory of a whole model, dense beside compressed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import architecture
from semisparse.engine import Engine, Sampling
from semisparse.errors import InputError
from semisparse.formats.base import Packed, get_format
from semisparse.nn import is_linear, replace_linear, weight_of
from semisparse.patterns import parse_pattern
from semisparse.runtime.device import device_facts

REPEATS = 5


@dataclass(frozen=True)
class Workload:
    """What is generated: ``batch`` prompts of ``prompt`` random tokens, then ``new`` tokens each, one at a time."""

    batch: int = 1
    prompt: int = 512
    new: int = 128


@dataclass(frozen=True)
class ModelSpeed:
    """How fast a model runs a workload; one line of the CSV.

    ``first_token_ms`` is the time until the first token, ``decode_ms`` that of a step of one token for the whole batch,
    both as the engine runs them for `semisparse generate`; ``weight_gb`` counts every parameter on this device;
    ``peak_gb`` is the most memory that it held, 0 on a CPU.
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


def measure_each(
    build: Callable[[Candidate | None], PreTrainedModel],
    name: str,
    chosen: Iterable[Candidate | None],
    workload: Workload,
    measure: Callable[[PreTrainedModel, str, str, Workload], ModelSpeed],
) -> Iterator[ModelSpeed]:
    """Measure a model once for each candidate, one of them in memory at a time; None is the model without semisparse.

    Args:
        build: makes the model for a candidate.
        name: of the model.
        chosen: the candidates.
        workload: how many tokens.
        measure: the measurement.
    Raises:
        InputError: the model's context is too short for the workload.
    """
    for candidate in chosen:
        model = build(candidate)
        yield measure(model, name, _weights_of(candidate, model.device), workload)
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


def measure_model(engine: Engine, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure prompts, decode and memory, as `semisparse generate` runs them.

    Args:
        engine: the model.
        name: of the model, for the table.
        weights: what its linear layers are, for the table.
        workload: how many tokens.
    Raises:
        InputError: the model's context is too short for it.
    """
    model, device = engine.model, engine.model.device
    if workload.prompt + workload.new > engine.backend.context:
        raise InputError(
            f"the model's context is {engine.backend.context} tokens; a prompt of {workload.prompt} and {workload.new} "
            f"new ones need {workload.prompt + workload.new}: ask for fewer"
        )
    facts = device_facts(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch, workload.prompt)
    prompts = torch.randint(engine.backend.vocabulary, shape, generator=generator).tolist()
    times = [_times(engine, prompts, workload.new) for _ in range(REPEATS + 1)][1:]  # the first compiles and captures
    first_token, step = (median(column) for column in zip(*times, strict=True))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return ModelSpeed(
        model=name,
        weights=weights,
        batch=workload.batch,
        prompt=workload.prompt,
        first_token_ms=first_token * 1e3,
        prefill_tokens_per_second=workload.batch * workload.prompt / first_token,
        decode_ms=step * 1e3,
        decode_tokens_per_second=workload.batch / step if step else 0.0,
        weight_gb=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e9,
        peak_gb=peak / 1e9,
        machine=facts.name,
        software=facts.driver,
    )


def _times(engine: Engine, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Return the seconds until the first token of a batch, and of each step after it."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)
    start = time.perf_counter()
    first = last = 0.0
    for _ in engine.backend.run(prompts, new, Sampling()):
        last = time.perf_counter() - start
        first = first or last
    return first, (last - first) / max(new - 1, 1)


def measure_in_engine(model: PreTrainedModel, name: str, weights: str, workload: Workload) -> ModelSpeed:
    """Measure a model as `measure_model` does."""
    return measure_model(Engine(model), name, weights, workload)

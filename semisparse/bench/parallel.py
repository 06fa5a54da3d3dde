"""Models of random weights spread over several devices by transformers' tensor parallelism, without a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from semisparse.bench.compiled import measure_rank
from semisparse.bench.model import ModelSpeed, Workload, measure_each
from semisparse.bench.roofline import Candidate, random_weight
from semisparse.bench.shapes import architecture
from semisparse.formats.base import Packed, get_format
from semisparse.nn import is_linear, join_layers, weight_of
from semisparse.patterns import parse_pattern


def measure_parallel(
    name: str, dtype: torch.dtype, device: torch.device, chosen: Iterable[Candidate | None], workload: Workload
) -> Iterator[ModelSpeed]:
    """Measure a named architecture over every rank, once for each candidate; sizes in GB are a rank's.

    Raises:
        InputError: there is no architecture of that name, or a layer cannot be cut over the ranks.
        FormatError: a format cannot store a layer.
    """
    for speed in measure_each(partial(parallel_model, name, dtype, device), name, chosen, workload, measure_rank):
        yield replace(speed, machine=f"{ranks()} x {speed.machine}")


def ranks() -> int:
    """Count the processes that ``torchrun`` started this one among."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this is the process that reports."""
    return int(os.environ.get("RANK", "0")) == 0


def parallel_model(name: str, dtype: torch.dtype, device: torch.device, candidate: Candidate | None) -> PreTrainedModel:
    """Build this rank's part of a named architecture, as loading a checkpoint would.

    Args:
        name: of the architecture.
        dtype: of weights and activations.
        device: where random weights are drawn and packed.
        candidate: what every linear layer but the head is stored as; None leaves the model as transformers has it.
    Raises:
        InputError: there is no architecture of that name, or a layer cannot be cut over the ranks.
        FormatError: the format cannot store a layer.
    """
    from transformers.distributed import DistributedConfig

    config = architecture(name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state: dict[str, Tensor] = {}
    if candidate is not None:
        packed = _packed_layers(skeleton, candidate, dtype, device)
        layers: dict[str, Any] = {layer: weight.spec.to_dict() for layer, weight in packed.items()}
        config.quantization_config = {"quant_method": "semisparse", "version": 1, "layers": layers}
        state = {f"{layer}.{key}": tensor for layer, w in packed.items() for key, tensor in w.tensors.items()}
    distributed = DistributedConfig(tp_plan="auto")
    found = type(skeleton).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, distributed_config=distributed
    )
    if device.type == "cuda":
        join_layers(found)
    return found.eval()


def _packed_layers(
    skeleton: PreTrainedModel, candidate: Candidate, dtype: torch.dtype, device: torch.device
) -> dict[str, Packed]:
    """Pack one random weight for each shape, which layers share until each rank has cut its part."""
    pattern, head = parse_pattern(candidate.pattern), skeleton.get_output_embeddings()
    by_shape: dict[tuple[int, ...], Packed] = {}
    found = {}
    for name, module in skeleton.named_modules():
        if is_linear(module) and module is not head:
            n, k = weight_of(module).shape
            if (n, k) not in by_shape:
                drawn = random_weight(pattern, n, k, dtype, device)
                by_shape[n, k] = get_format(candidate.format).pack(drawn, pattern, **candidate.options)
            found[name] = by_shape[n, k]
    return found

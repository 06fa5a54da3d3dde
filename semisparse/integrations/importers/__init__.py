"""Reading checkpoints that other tools quantised: every quantised weight is dequantised to a dense one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from semisparse.checkpoint import NO_REMOTE_CODE, ModelDirectory, auto_class, open_files
from semisparse.errors import CheckpointError, InputError
from semisparse.integrations.importers import awq, compressed_tensors, fp8, gptq
from semisparse.integrations.importers.method import Method

METHODS: dict[str, Method] = {
    "compressed-tensors": compressed_tensors.METHOD,
    "gptq": gptq.METHOD,
    "awq": awq.METHOD,
    "fp8": fp8.METHOD,
    "fbgemm_fp8": fp8.METHOD,
}
"""By the ``quant_method`` of config.json."""


def quantised_elsewhere(path: str | Path) -> str | None:
    """Return the ``quant_method`` of a model directory that another tool quantised; None for any other directory.

    Raises:
        CheckpointError: the directory is missing or incomplete.
    """
    block = open_files(path).config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, dict) else None
    return method if method in METHODS else None


def load_dequantised(path: str | Path) -> PreTrainedModel:
    """Load a model that another tool quantised as a dense model on the CPU, in the dtype of its config.

    Args:
        path: a model directory with a ``quantization_config`` of one of `METHODS`.
    Raises:
        CheckpointError: the directory is incomplete, or a tensor does not fit the others of its layer.
        InputError: no reader knows its method, or an option of it.
    """
    directory = open_files(path)
    block = directory.config.get("quantization_config")
    if not isinstance(block, dict) or block.get("quant_method") not in METHODS:
        raise InputError(f"{path} is not quantised by one of {', '.join(METHODS)}")
    config = AutoConfig.from_pretrained(directory.path, **NO_REMOTE_CODE)
    del config.quantization_config
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    state = dense_tensors(directory, METHODS[block["quant_method"]], block, dtype)
    with torch.device("meta"):
        model_class = type(auto_class(config).from_config(config))
    return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def dense_tensors(
    directory: ModelDirectory, method: Method, block: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return all tensors of a directory by name, with one dense ``weight`` in the place of each layer's parts.

    Args:
        directory: the files.
        method: how weights are stored.
        block: the ``quantization_config``.
        dtype: of the dense weights.
    Raises:
        CheckpointError: a layer's tensors do not fit one another.
        InputError: the block has an option that is not supported.
    """
    layers: dict[str, list[str]] = {}
    for name in directory.headers:
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, []).append(part)
    tensors = {}
    for layer, parts in layers.items():
        quantised = not method.markers.isdisjoint(parts)
        read = {part: directory.read(f"{layer}.{part}" if layer else part) for part in parts}
        if quantised:
            try:
                weight = method.dequantise(read, block)
            except CheckpointError as error:
                raise CheckpointError(f"layer {layer} of {directory.path}: {error}") from error
            read = {part: tensor for part, tensor in read.items() if part not in method.parts}
            read["weight"] = weight.to(dtype)
        elif method.dropped:
            read = {part: tensor for part, tensor in read.items() if part not in method.dropped}
        tensors.update({f"{layer}.{part}" if layer else part: tensor for part, tensor in read.items()})
    return tensors

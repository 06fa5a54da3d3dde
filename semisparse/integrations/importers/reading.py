"""Loading a model that another tool quantised: a dense model, and the quantised weights that it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from semisparse.checkpoint import ModelDirectory, meta_model, open_files, refuse_integers, refuse_unstored
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.integrations.importers import awq, compressed_tensors, fp8, gptq, mxfp4
from semisparse.integrations.importers.method import FLOATS, Method, Rounded
from semisparse.integrations.names import model_keys

METHODS: dict[str, Method] = {
    "compressed-tensors": compressed_tensors.METHOD,
    "gptq": gptq.METHOD,
    "awq": awq.METHOD,
    "fp8": fp8.METHOD,
    "fbgemm_fp8": fp8.METHOD,
    "mxfp4": mxfp4.METHOD,
}
"""The methods by the ``quant_method`` of config.json."""

SMALL = 16
"""Tensors of at most this many elements are read before the checks: some hold a weight's shape."""


Names = Mapping[str, str]
"""Names in the files of a layer's tensors, by part (``qweight``, ``scales``, ...)."""


def quantised_elsewhere(path: str | Path) -> str | None:
    """Return the ``quant_method`` of a model directory that another tool quantised; None for any other directory.

    Raises:
        CheckpointError: the directory is missing or incomplete.
    """
    block = open_files(path).config.get("quantization_config")
    method = block.get("quant_method") if isinstance(block, dict) else None
    return method if isinstance(method, str) and method in METHODS else None


def load_dequantised(path: str | Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, dict[str, Rounded]]:
    """Load and dequantise a model that another tool quantised, on the CPU.

    Args:
        path: a model directory with a ``quantization_config`` of one of `METHODS`.
        dtype: dtype of the model; by default its config's. Dequantised weights are rounded to the config's in any case.
    Returns:
        The model, and its quantised weights by the layer's name in the files.
    Raises:
        CheckpointError: the directory is incomplete, or a tensor contradicts the config or the rest of its layer.
        InputError: an option of the method is not supported.
    """
    directory = open_files(path)
    block = directory.config["quantization_config"]
    method = METHODS[block["quant_method"]]
    skeleton = meta_model(directory)
    layers = _layers(directory, method)
    quantised = [name for name, parts in layers.items() if not method.markers.isdisjoint(parts)]
    _check(directory, method, block, skeleton, {name: layers[name] for name in quantised})
    config = skeleton.config
    declared = getattr(config, "dtype", None) or torch.bfloat16
    if declared not in FLOATS:
        raise CheckpointError(
            f"{directory.path}: dtype is {declared} in config.json, expected float16, bfloat16 or float32"
        )
    state, rounded = _dense_tensors(directory, method, block, layers, quantised, declared)
    _transpose_conv1d(skeleton, state, quantised)
    try:
        model, report = type(skeleton).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype or declared, output_loading_info=True
        )
    except (SemisparseError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many types
        raise CheckpointError(f"cannot load {directory.path}: {type(error).__name__}: {error}") from error
    if report["missing_keys"]:
        raise CheckpointError(
            f"tensor {min(report['missing_keys'])} is missing from the safetensors files of {directory.path}"
        )
    refuse_integers(model, ())
    return model.eval(), rounded


def _layers(directory: ModelDirectory, method: Method) -> dict[str, dict[str, str]]:
    """Return the names of all tensors, by layer and part."""
    layers: dict[str, dict[str, str]] = {}
    for name in directory.headers:
        layer, _, part = name.rpartition(method.separator)
        layers.setdefault(layer, {})[part] = name
    return layers


def _check(
    directory: ModelDirectory,
    method: Method,
    block: Mapping[str, Any],
    skeleton: PreTrainedModel,
    layers: Mapping[str, Names],
) -> None:
    """Check the headers of every quantised layer before a weight is read.

    Raises:
        CheckpointError: a dtype or shape contradicts the layer's other tensors, the config's groups or the model; or
            the model is far too large for the files.
    """
    for name, header in directory.headers.items():
        if header.dtype is None:
            raise CheckpointError(f"tensor {name} of {directory.path} has a dtype that torch does not know")
    # A byte holds up to 8 codes: the limit on parameters per stored byte is 8 times that of other models.
    refuse_unstored(skeleton, 8 * directory.stored_bytes)
    keys = model_keys(skeleton, [layer + method.weight for layer in layers])
    parameters = dict(skeleton.named_parameters())
    for layer, parts in layers.items():
        tensors = {part: _meta_tensor(directory, name) for part, name in parts.items() if part in method.parts}
        shape = _call(directory, layer, method.measure, tensors, block)
        key = keys.get(layer + method.weight, "")
        if key not in parameters:
            continue  # transformers fuses it with others, and checks their shapes then
        module = skeleton.get_submodule(key.rpartition(".")[0])
        expected = tuple(parameters[key].shape)
        if (shape[::-1] if isinstance(module, Conv1D) else shape) != expected:
            raise CheckpointError(
                f"layer {layer} of {directory.path} holds a weight {list(shape)}, expected {list(expected)} by "
                "config.json"
            )


def _meta_tensor(directory: ModelDirectory, name: str) -> Tensor:
    """Return a tensor on the meta device; a small one with its values."""
    header = directory.headers[name]
    if torch.Size(header.shape).numel() <= SMALL:
        return directory.read(name)
    return torch.empty(header.shape, dtype=header.dtype, device="meta")


def _dense_tensors(
    directory: ModelDirectory,
    method: Method,
    block: Mapping[str, Any],
    layers: Mapping[str, Names],
    quantised: Sequence[str],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], dict[str, Rounded]]:
    """Return the dense model's tensors by name, and the quantised weights by layer."""
    tensors, rounded, quantised_layers = {}, {}, set(quantised)
    for layer, parts in layers.items():
        skipped = method.parts if layer in quantised_layers else method.dropped
        tensors.update({name: directory.read(name) for part, name in parts.items() if part not in skipped})
        if layer in quantised_layers:
            stored = {part: directory.read(name) for part, name in parts.items() if part in method.parts}
            weight = _call(directory, layer, method.read, stored, block)
            if isinstance(weight, Rounded):
                rounded[layer] = weight
                weight = weight.dequantised()
            tensors[layer + method.weight] = weight.to(dtype)
    return tensors, rounded


def _call(directory: ModelDirectory, layer: str, function: Any, *args: Any) -> Any:
    """Call a function of the method; put the layer in its error messages."""
    try:
        return function(*args)
    except SemisparseError as error:
        raise type(error)(f"layer {layer} of {directory.path}: {error}") from error


def _transpose_conv1d(skeleton: nn.Module, state: dict[str, Tensor], quantised: Sequence[str]) -> None:
    """Transpose the weights of GPT-2's `Conv1D`: tools store all linear layers as [N, K]."""
    transposed = {name for name, module in skeleton.named_modules() if isinstance(module, Conv1D)}
    prefix = f"{getattr(skeleton, 'base_model_prefix', '')}."
    for layer in quantised:
        if layer in transposed or prefix + layer in transposed:
            state[f"{layer}.weight"] = state[f"{layer}.weight"].T.contiguous()

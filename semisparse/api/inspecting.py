"""Describing a model directory, and checking its tensors against the model in config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from semisparse import checkpoint
from semisparse.checkpoint import meta_model, open_directory
from semisparse.errors import CheckpointError
from semisparse.integrations.names import model_keys, model_layers
from semisparse.nn import is_linear, prepare_experts, weight_of


def inspect_directory(
    path: str | Path, verify: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Describe a model directory, as `checkpoint.inspect_directory` does.

    Args:
        path: a dense or compressed model directory.
        verify: whether to validate every packed tensor, to compare it with its digest, and to check all shapes against
            the model in config.json.
        progress: called with (layers done, all layers).
    Raises:
        CheckpointError: the directory is incomplete or corrupted, or a shape differs from the model's.
    """
    description = checkpoint.inspect_directory(path, verify, progress)
    if verify:
        check_shapes(path)
    return description


def check_shapes(path: str | Path) -> None:
    """Check that a directory's layers and tensors have the shapes of the model in its config.json.

    Raises:
        CheckpointError: the model cannot be built, or a layer or tensor has another shape.
    """
    directory = open_directory(path)
    model = meta_model(directory)
    names = model_layers(model, directory.layers)
    prepare_experts(model, names.values())
    linears = {name: tuple(weight_of(module).shape) for name, module in model.named_modules() if is_linear(module)}
    for name, packed in directory.layers.items():
        if linears.get(names[name]) != packed.shape:
            raise CheckpointError(
                f"layer {name} is stored as N, K = {packed.shape}; the model of config.json has "
                f"{linears.get(names[name], 'no such linear layer')}"
            )
    parameters = dict(model.named_parameters())
    for stored, name in model_keys(model, directory.headers).items():
        header, parameter = directory.headers[stored], parameters.get(name)
        if parameter is not None and header.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"tensor {stored} is {list(header.shape)}, the model of config.json has {list(parameter.shape)}"
            )

"""Describing a model directory, and checking its tensors against the model in config.json.

transformers builds that model. What its layers and tensors are called and their shapes are recorded in the user's cache
directory, so that later directories of the same model are checked without importing transformers, which takes 2 s.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisparse.checkpoint.file_layers import FileLayers
from semisparse.runtime.cache import cached, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from semisparse.checkpoint import ModelDirectory

FOLDER = "model-shapes"
"""The folder of the cache directory."""

SOURCES = ("api/inspecting.py", "checkpoint/*.py", "integrations/*.py", "nn/*.py")
"""The code, beside transformers, that the recorded shapes depend on."""


def inspect_directory(
    path: str | Path, verify: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Describe a model directory, as `checkpoint.describe` does.

    Args:
        path: a dense or compressed model directory.
        verify: whether to validate every packed tensor, to compare it with its digest, and to check all shapes against
            the model in config.json.
        progress: called with (layers done, all layers).
    Raises:
        CheckpointError: the directory is incomplete or corrupted, or a shape differs from the model's.
    """
    if not verify:
        from semisparse.checkpoint import describe, open_directory

        return describe(open_directory(path), False, progress)
    layers = FileLayers(path)  # from now on: the imports below take seconds
    try:
        return _verified(path, progress, layers)
    finally:
        layers.stop()


def _verified(path: str | Path, progress: Callable[[int, int], None] | None, layers: FileLayers) -> dict[str, Any]:
    """Check tensors in a thread while transformers is imported, if it is needed, then all shapes.

    The shapes come last: building a model changes torch's default dtype, which the checks of tensors must not see.
    """
    from semisparse.checkpoint import describe, open_directory  # imports torch, not transformers

    directory = open_directory(path)  # imports the formats: two threads must not import modules that import each other
    with ThreadPoolExecutor(1) as pool:
        described = pool.submit(describe, directory, True, progress, layers)
        try:
            if lookup(FOLDER, _key(directory)) is None:
                importlib.import_module("semisparse.checkpoint.loading")
                importlib.import_module("semisparse.integrations.names")
            description = described.result()
        except BaseException:
            layers.stop()
            raise
    check_shapes(directory)
    return description


def check_shapes(directory: ModelDirectory) -> None:
    """Check that a directory has the layers and tensors of the model in its config.json, in its shapes.

    Raises:
        CheckpointError: the model cannot be built, a layer or tensor has another shape, or a tensor is missing.
    """
    from semisparse.errors import CheckpointError

    layers, tensors = json.loads(cached(FOLDER, _key(directory), partial(_shapes, directory)))
    for name, packed in directory.layers.items():
        if layers[name] != list(packed.shape):
            raise CheckpointError(
                f"layer {name} is stored as N, K = {packed.shape}; the model of config.json has "
                f"{tuple(layers[name]) if layers[name] else 'no such linear layer'}"
            )
    for name, shape in tensors.items():
        if shape != list(directory.headers[name].shape):
            raise CheckpointError(
                f"tensor {name} is {list(directory.headers[name].shape)}, the model of config.json has {shape}"
            )


def _key(directory: ModelDirectory) -> bytes:
    """Return all that the model's shapes depend on: its config, the stored names, and the code."""
    root = Path(__file__).parents[1]
    sources = sha256(b"".join(file.read_bytes() for each in SOURCES for file in sorted(root.glob(each))))
    config = {key: value for key, value in directory.config.items() if key != "quantization_config"}
    layers = {name: sorted(packed.tensors) for name, packed in directory.layers.items()}
    names = [config, layers, sorted(directory.headers), *map(version, ("torch", "transformers")), sources.hexdigest()]
    return json.dumps(names, sort_keys=True).encode()


def _shapes(directory: ModelDirectory) -> bytes:
    """Return the shapes in the model, as JSON, by names on disk: of packed layers and of tensors.

    A packed layer that is no linear layer in the model has None.

    Raises:
        CheckpointError: the model cannot be built, or one of its tensors is missing.
    """
    from semisparse.checkpoint import meta_model
    from semisparse.integrations.names import model_keys, model_layers
    from semisparse.nn import is_linear, prepare_experts, weight_of

    model = meta_model(directory)
    names = model_layers(model, directory.layers)
    prepare_experts(model, names.values())
    linears = {name: list(weight_of(module).shape) for name, module in model.named_modules() if is_linear(module)}
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = {
        key: parameters[name] for key, name in model_keys(model, directory.headers).items() if name in parameters
    }
    _refuse_missing(model, directory, set(names.values()))
    return json.dumps([{name: linears.get(names[name]) for name in directory.layers}, tensors]).encode()


def _refuse_missing(model: PreTrainedModel, directory: ModelDirectory, packed: Set[str]) -> None:
    """Refuse a directory without one of its model's tensors.

    transformers may split or fuse stored tensors, and adds or removes the prefix of a base model: a model of which any
    tensor is split or fused is not checked here, but when it is loaded.

    Args:
        model: dense, on the meta device.
        directory: what is stored.
        packed: the packed layers' names in the model.
    """
    from semisparse.errors import CheckpointError
    from semisparse.integrations.names import model_keys

    keys = model_keys(model, directory.headers)
    if len(keys) < len(directory.headers):
        return
    stored = {name.removeprefix(f"{model.base_model_prefix}.") for name in keys.values()}
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    ignored = model._keys_to_ignore_on_load_missing or ()
    for name, _ in model.named_parameters():
        is_packed = name.rpartition(".")[0] in packed and name.endswith(".weight")
        if is_packed or name in tied or any(re.search(pattern, name) for pattern in ignored):
            continue
        if name.removeprefix(f"{model.base_model_prefix}.") not in stored:
            raise CheckpointError(f"tensor {name} is missing from the safetensors files of {directory.path}")

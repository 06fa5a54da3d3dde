"""Names on disk: transformers renames a model's tensors when it saves them, and back when it loads them.

The ``quantization_config`` names layers as the safetensors files do, which is also how other software names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from semisparse.errors import CheckpointError


def stored_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Return the names on disk of tensors, by their names in the model.

    Args:
        model: as it will be saved.
        keys: names of tensors that are stored unchanged, not split or fused.
    """
    names = list(keys)
    renamed = revert_weight_conversion(
        model, {name: torch.tensor(index, device="cpu") for index, name in enumerate(names)}
    )
    return {names[int(index)]: key for key, index in renamed.items()}


def model_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Return tensors' names in the model, by their names on disk; those that are split or fused are left out.

    The checkpoint may be of the same model with another head, or without one.

    As in transformers' loading, a name that would be renamed to none of the model's stays if it is one of them itself:
    DeepSeek-V4's conversion renames every ``.norm.``, and its final norm is called so.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamed = {key: rename_source_key(key, renamings, converters) for key in keys}
    own = model.state_dict() if renamings or converters else {}
    prefix = f"{model.base_model_prefix}."
    own_keys = {}
    for key, (name, converter) in renamed.items():
        alike = {name, prefix + name, name.removeprefix(prefix)}
        if not alike & own.keys() and key in own:
            own_keys[key] = key
        elif converter is None:
            own_keys[key] = with_other_head(model, name)
    return own_keys


def with_other_head(model: PreTrainedModel, name: str) -> str:
    """Return ``name`` with or without the prefix of the base model, whichever ``model`` has.

    ``AutoModel`` loads ``model.layers.0...`` of a causal model as ``layers.0...``; a causal model
    does the reverse.
    """
    prefix, first = model.base_model_prefix, name.partition(".")[0]
    if not prefix or hasattr(model, first):
        return name
    if first == prefix:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if hasattr(getattr(model, prefix, None), first) else name


def stored_layers(model: PreTrainedModel, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the names on disk of packed layers (anything with ``tensors``), by module name."""
    return _layers(stored_keys(model, _tensor_keys(layers)), layers)


def model_layers(model: PreTrainedModel, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return the module names of packed layers (anything with ``tensors``), by their names on disk.

    Raises:
        CheckpointError: the tensors of a layer have no name in common.
    """
    return _layers(model_keys(model, _tensor_keys(layers)), layers)


def _tensor_keys(layers: Mapping[str, Any]) -> list[str]:
    return [f"{name}.{tensor}" for name, layer in layers.items() for tensor in layer.tensors]


def _layers(renamed: Mapping[str, str], layers: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for name, layer in layers.items():
        new_names = {renamed.get(f"{name}.{tensor}", "").removesuffix(f".{tensor}") for tensor in layer.tensors}
        if len(new_names) > 1 or new_names == {""}:
            raise CheckpointError(f"transformers renames the tensors of layer {name} to several: {sorted(new_names)}")
        names[name] = new_names.pop()
    return names

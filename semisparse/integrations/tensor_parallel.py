"""transformers' tensor parallelism, ``DistributedConfig(tp_plan="auto")``, for packed layers of every format.

transformers can slice a tensor that is a matrix of rows and columns only. So every rank loads a layer's tensors whole,
keeps its own part once they have been checked (unpacking and packing anew where a format asks for it), and saving
gathers the parts to the bytes that were loaded. The exchange of activations is transformers' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor, distributed
from transformers import PreTrainedModel

from semisparse.checkpoint import read_block
from semisparse.errors import CheckpointError, InputError, SemisparseError
from semisparse.nn import JoinedLinear, SparseLinear, cut, join

WHOLE = "semisparse_whole"
"""The style of a parameter that every rank loads whole; it does nothing."""


def load_whole(model: PreTrainedModel, layers: Mapping[str, SparseLinear]) -> None:
    """Keep transformers from slicing packed tensors; to be called before it distributes the model."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())
    plan = model.tp_plan
    for name, layer in layers.items():
        if _style(model, name) is not None:
            plan.update({_generic(f"{name}.{tensor}"): WHOLE for tensor in layer.packed.tensors})


def keep_own_part(model: PreTrainedModel, layers: Mapping[str, SparseLinear]) -> None:
    """Cut every layer to this rank's part, if the model is distributed.

    Raises:
        InputError: a layer is distributed in a way that packed layers are not, or cannot be cut.
    """
    mesh = _mesh(model)
    if mesh is None:
        return
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sequences = any(str(style).startswith("sequence") for style in model.tp_plan.values())
    for name, layer in layers.items():
        dim = _dimension(model, name)
        if dim is None:
            continue
        packed = layer.packed
        size, rest = divmod(packed.shape[dim], ranks)
        if rest:
            names = ("rows", "columns")[dim]
            raise InputError(f"layer {name} has {packed.shape[dim]} {names}, which do not divide over {ranks} ranks")
        try:
            layer.packed = cut(packed, dim, rank * size, (rank + 1) * size)
        except SemisparseError as error:
            raise InputError(f"layer {name} over {ranks} ranks: {error}") from error
        layer.wrapped_for_gradients = _style(model, name) == "colwise" and not sequences


def gathered(model: PreTrainedModel, block: Mapping[str, Any], layers: Mapping[str, SparseLinear]) -> dict[str, Tensor]:
    """Give the state of a distributed model with every packed layer whole again, on the first rank.

    Args:
        model: what `keep_own_part` cut.
        block: the ``quantization_config`` block it was loaded with.
        layers: its packed layers by name.
    Returns:
        Names on disk to tensors; the other ranks keep their parts, which transformers does not save.
    Raises:
        CheckpointError: a layer's parts give other bytes than were loaded, or layers are joined.
    """
    if any(isinstance(layer, JoinedLinear) for layer in layers.values()):
        raise CheckpointError("layers are joined, which cannot be gathered from the ranks: save before joining them")
    mesh = _mesh(model)
    state, declared = dict(model.state_dict()), read_block(block)
    for name, layer in layers.items():
        dim = _dimension(model, name)
        if mesh is None or dim is None:
            continue
        parts: list[Any] | None = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
        group = mesh.get_group()
        distributed.gather_object(_to_bytes(layer.packed), parts, distributed.get_global_rank(group, 0), group)
        if parts is None:
            continue
        whole = join([_from_bytes(*part) for part in parts], dim, declared[name].pattern)
        if whole.spec != declared[name].spec:
            raise CheckpointError(
                f"layer {name} was packed with options that its entry in config.json does not keep, so its parts do "
                "not pack to the bytes that were loaded: save it from one process, without tensor parallelism"
            )
        state.update({f"{name}.{tensor}": values for tensor, values in whole.tensors.items()})
    return state


def _to_bytes(packed: Any) -> tuple[Any, bytes]:
    """Take a packed weight apart for sending; torch cannot pickle 8-bit floats."""
    stored = packed.to("cpu")
    return replace(stored, tensors={}), save(stored.tensors)


def _from_bytes(declared: Any, tensors: bytes) -> Any:
    return replace(declared, tensors=load(tensors))


def is_distributed(model: PreTrainedModel) -> bool:
    """Say whether transformers has spread the model over several ranks."""
    return _mesh(model) is not None


def _mesh(model: PreTrainedModel) -> Any:
    """Give the ranks that share each layer, None if the model is whole."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return mesh["tp"] if mesh.ndim > 1 else mesh


def _dimension(model: PreTrainedModel, name: str) -> int | None:
    """Give what a layer is cut along, None if every rank has it whole."""
    style = _style(model, name)
    if style is None or style.startswith("replicate"):
        return None
    for dim, start in enumerate(("colwise", "rowwise")):
        if style.startswith(start):
            return dim
    raise InputError(f"layer {name} is to be distributed as {style!r}; packed layers know colwise and rowwise")


def _style(model: PreTrainedModel, name: str) -> str | None:
    return model.tp_plan.get(_generic(name)) or model.tp_plan.get(name)


def _generic(name: str) -> str:
    """Name a module or parameter as transformers' plans do, with ``*`` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)

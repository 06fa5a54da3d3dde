"""transformers' tensor parallelism, ``DistributedConfig(tp_plan="auto")``, for packed layers of every format.

transformers can shard only tensors that are matrices of rows and columns, which packed tensors are not. So every rank
loads each layer whole, validates it and keeps its shard (`nn.slice_weight`). Saving gathers the shards and concatenates
them to the bytes that were loaded. The collectives on activations are transformers' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor, distributed
from transformers import PreTrainedModel

from semisparse.errors import CheckpointError, InputError, SemisparseError
from semisparse.nn import JoinedLinear, SparseExperts, SparseLinear, concatenate_weights, slice_weight

WHOLE = "semisparse_whole"
"""The parallel style, without any effect, of a parameter that every rank loads whole."""


def load_tensors_whole(model: PreTrainedModel, layers: Mapping[str, SparseLinear]) -> None:
    """Add packed tensors to the model's plan as tensors that transformers does not shard.

    Call it before transformers distributes the model.
    """
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    ALL_PARALLEL_STYLES.register(WHOLE, TensorParallelLayer())
    plan = model.tp_plan
    for name, layer in layers.items():
        if _style(model, name) is not None:
            plan.update({_plan_key(f"{name}.{tensor}"): WHOLE for tensor in layer.packed.tensors})


def shard_layers(model: PreTrainedModel, layers: Mapping[str, SparseLinear]) -> None:
    """Replace every layer's weight by this rank's shard, if the model is distributed.

    Raises:
        InputError: a layer's style is neither column- nor row-parallel, a layer cannot be sliced evenly, or the model
            has packed experts.
    """
    mesh = _tp_mesh(model)
    if mesh is None:
        return
    experts = [name for name, module in model.named_modules() if isinstance(module, SparseExperts)]
    if experts:
        raise InputError(
            f"packed experts ({experts[0]}) run on one device only: load the model without tensor parallelism"
        )
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sequence_parallel = any(str(style).startswith("sequence") for style in model.tp_plan.values())
    for name, layer in layers.items():
        dim = _shard_dim(model, name)
        if dim is None:
            continue
        packed = layer.packed
        size, rest = divmod(packed.shape[dim], ranks)
        if rest:
            names = ("rows", "columns")[dim]
            raise InputError(f"layer {name} has {packed.shape[dim]} {names}, which do not divide over {ranks} ranks")
        try:
            layer.packed = slice_weight(packed, dim, rank * size, (rank + 1) * size)
        except SemisparseError as error:
            raise InputError(f"layer {name} over {ranks} ranks: {error}") from error
        layer.wrapped_for_gradients = _style(model, name) == "colwise" and not sequence_parallel


def gather_state_dict(
    model: PreTrainedModel, declared: Mapping[str, Any], layers: Mapping[str, SparseLinear]
) -> dict[str, Tensor]:
    """Return a distributed model's state dict; on the first rank it has every packed layer whole.

    Args:
        model: sharded by `shard_layers`.
        declared: the layers that the model was loaded with, as `read_block` returns them, by module name.
        layers: its packed layers by name.
    Returns:
        Tensors by their names in the model. The other ranks return their shards, which transformers does not save.
    Raises:
        CheckpointError: a layer's shards do not concatenate to the bytes that were loaded, or layers are joined.
    """
    if any(isinstance(layer, JoinedLinear) for layer in layers.values()):
        raise CheckpointError("layers are joined, which cannot be gathered from the ranks: save before joining them")
    mesh = _tp_mesh(model)
    state = dict(model.state_dict())
    for name, layer in layers.items():
        dim = _shard_dim(model, name)
        if mesh is None or dim is None:
            continue
        shards: list[Any] | None = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
        group = mesh.get_group()
        distributed.gather_object(_serialise(layer.packed), shards, distributed.get_global_rank(group, 0), group)
        if shards is None:
            continue
        whole = concatenate_weights([_deserialise(*shard) for shard in shards], dim, declared[name].pattern)
        if whole.spec != declared[name].spec:
            raise CheckpointError(
                f"layer {name} was packed with options that its entry in config.json does not record, so its shards do "
                "not pack to the bytes that were loaded: save it from one process, without tensor parallelism"
            )
        state.update({f"{name}.{tensor}": values for tensor, values in whole.tensors.items()})
    return state


def _serialise(packed: Any) -> tuple[Any, bytes]:
    """Return a packed weight without tensors, and the tensors as safetensors: torch cannot pickle 8-bit floats."""
    stored = packed.to("cpu")
    return replace(stored, tensors={}), save(stored.tensors)


def _deserialise(packed: Any, tensors: bytes) -> Any:
    return replace(packed, tensors=load(tensors))


def is_distributed(model: PreTrainedModel) -> bool:
    """Return whether transformers has distributed the model over several ranks."""
    return _tp_mesh(model) is not None


def _tp_mesh(model: PreTrainedModel) -> Any:
    """Return the device mesh of the tensor-parallel ranks; None if the model is not distributed."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return mesh["tp"] if mesh.ndim > 1 else mesh


def _shard_dim(model: PreTrainedModel, name: str) -> int | None:
    """Return 0 if a layer is sharded along N, 1 if along K, None if every rank has it whole."""
    style = _style(model, name)
    if style is None or style.startswith("replicate"):
        return None
    for dim, start in enumerate(("colwise", "rowwise")):
        if style.startswith(start):
            return dim
    raise InputError(f"layer {name} is to be distributed as {style!r}; packed layers support colwise and rowwise")


def _style(model: PreTrainedModel, name: str) -> str | None:
    return model.tp_plan.get(_plan_key(name)) or model.tp_plan.get(name)


def _plan_key(name: str) -> str:
    """Return a module's or parameter's name as transformers' plans write it, with ``*`` for every number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)

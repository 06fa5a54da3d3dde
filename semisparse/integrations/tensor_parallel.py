"""transformers' tensor and expert parallelism (``DistributedConfig``) for packed layers of every format.

transformers can shard only tensors that are matrices of rows and columns, which packed tensors are not. So every rank
loads each layer whole, validates it and keeps its shard (`nn.slice_weight`). Saving gathers the shards and concatenates
them to the bytes that were loaded. The collectives on activations are transformers' own.

Packed experts are divided, whole, among the ranks, under both plans: a rank adds up the outputs of its own experts, and
transformers' style ``moe_tp_experts`` sums these over the ranks.
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

SUMMED = "moe_tp_experts"
"""transformers' style of experts whose outputs are summed over the ranks."""

ROUTED = "ep_router"
"""A style of earlier versions, with which a router gives each rank the numbers of its own experts."""


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
    for name in _packed_experts(model):
        # Experts are divided in this way under both plans. A rule of the expert-parallel plan would override this one.
        plan[_plan_key(name)] = SUMMED
        (getattr(model, "ep_plan", None) or {}).pop(_plan_key(name), None)


def shard_layers(model: PreTrainedModel, layers: Mapping[str, SparseLinear]) -> None:
    """Replace every layer's weight by this rank's shard, if the model is distributed.

    Raises:
        InputError: a layer's style is neither column- nor row-parallel, a layer cannot be sliced evenly, or experts do
            not divide over the ranks.
    """
    mesh = _tp_mesh(model)
    experts = _packed_experts(model)
    if experts:
        _require_one_batch(model, next(iter(experts)))
    if mesh is None:
        return
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, module in experts.items():
        _divide(model, name, module, rank, ranks)
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
    state = {key: tensor for key, tensor in model.state_dict().items() if tensor.device.type != "meta"}
    if mesh is None:
        return state
    for name, module in _packed_experts(model).items():
        own = {key: t.cpu().contiguous() for key, t in module.state_dict().items() if t.device.type != "meta"}
        for held in _gather(save(own), mesh):
            state.update({f"{name}.{key}": tensor for key, tensor in load(held).items()})
    for name, layer in layers.items():
        dim = _shard_dim(model, name)
        if dim is None:
            continue
        shards = _gather(_serialise(layer.packed), mesh)
        if not shards:
            continue
        whole = concatenate_weights([_deserialise(*shard) for shard in shards], dim, declared[name].pattern)
        if whole.spec != declared[name].spec:
            raise CheckpointError(
                f"layer {name} was packed with options that its entry in config.json does not record, so its shards do "
                "not pack to the bytes that were loaded: save it from one process, without tensor parallelism"
            )
        state.update({f"{name}.{tensor}": values for tensor, values in whole.tensors.items()})
    return state


def _packed_experts(model: PreTrainedModel) -> dict[str, SparseExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseExperts)}


def _require_one_batch(model: PreTrainedModel, name: str) -> None:
    """Refuse expert parallelism over ranks that have different tokens.

    Raises:
        InputError: ``ep_size`` is above ``tp_size``: some ranks that share the experts have different batches.
    """
    config = getattr(model.config, "distributed_config", None)
    experts, batch = (getattr(config, size, None) or 1 for size in ("ep_size", "tp_size"))
    if experts > batch:
        raise InputError(
            f"packed experts ({name}) are divided among ranks that have one batch, got ep_size={experts} and "
            f"tp_size={batch}: set tp_size to ep_size"
        )


def _divide(model: PreTrainedModel, name: str, experts: SparseExperts, rank: int, ranks: int) -> None:
    """Leave a rank its share of the experts, or all if the plan has no rule for them.

    Raises:
        InputError: their number does not divide, or transformers does not sum their outputs over the ranks.
    """
    style = _style(model, name)
    if style is None:
        return
    routers = {key: ROUTED for key, found in model.tp_plan.items() if found == ROUTED}
    if style != SUMMED or routers:
        styles = {name: style} | routers
        raise InputError(f"experts are to be distributed as {styles}; packed experts support {SUMMED!r} alone")
    size, rest = divmod(experts.num_experts, ranks)
    if rest:
        raise InputError(f"{name} has {experts.num_experts} experts, which do not divide over {ranks} ranks")
    experts.hold(range(rank * size, (rank + 1) * size))


def _gather(own: Any, mesh: Any) -> list[Any]:
    """Return what each rank has, in rank order, on the first rank; nothing on the others."""
    everyone: list[Any] | None = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
    group = mesh.get_group()
    distributed.gather_object(own, everyone, distributed.get_global_rank(group, 0), group)
    return everyone or []


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

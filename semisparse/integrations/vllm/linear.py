"""vLLM's linear layer with packed weights: loading, sharding, and the matmul.

Each layer loads unsharded tensors in the disk layout, slices out this tensor-parallel rank's shard, and stacks the
weights of a fused layer. To find the rank's rows or columns, the adapter passes their indices through vLLM's own weight
loader as if they were weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.parameter import ModelWeightParameter

from semisparse.checkpoint import packed_from_tensors
from semisparse.errors import CheckpointError, FormatError, InputError
from semisparse.integrations.vllm.settings import RELOADED
from semisparse.nn import StackedLinear, check_slice, slice_weight
from semisparse.nn.fused_linear import ADDED, GATED, NORMED

if TYPE_CHECKING:
    from semisparse.formats.base import Packed

QKV = ("q", "k", "v")
"""vLLM's shard ids of a fused QKV layer, in the order of its rows. Other fused layers use 0, 1, ..."""

ShardId = str | int | None


class SemisparseLinearMethod(LinearMethodBase):
    """A linear layer of vLLM with packed weights.

    Args:
        layers: the checkpoint's layers that vLLM's layer contains, by name and in vLLM's order, as `read_block` returns
            them.
        tokens: maximum number of tokens per step of vLLM.
        fuses: whether vLLM compiles graphs with `fusion.FusionPass`.
        copies: whether dense copies are kept, for the numbers of tokens at which these are faster.
    """

    def __init__(self, layers: Mapping[str, Packed], tokens: int, fuses: bool = False, copies: bool = False) -> None:
        self._names = list(layers)
        self._declared = list(layers.values())
        self._tokens, self._fuses, self._copies = tokens, fuses, copies
        self._dtype = torch.get_default_dtype()
        self._parts: list[list[tuple[int, int, int]]] = []  # per weight, as `_runs_of_rank` yields them
        self._loaded: list[dict[str, Tensor]] = [{} for _ in layers]  # the tensors of weights that are not complete yet
        self._complete: set[int] = set()  # indices of complete weights
        self._shards: dict[int, Packed] = {}  # by first row (column if row-parallel) in this rank's layer

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **others: Any,
    ) -> None:
        """Register one empty parameter per tensor name. Its loader receives that tensor, unsharded, of every weight.

        Raises:
            InputError: a weight cannot be cut where this rank's shard begins or ends.
        """
        self._dtype, dim = params_dtype, _sharded_dim(layer)
        for index, (name, declared) in enumerate(zip(self._names, self._declared, strict=True)):
            parts = list(_runs_of_rank(layer, dim, declared.shape[dim], self._shard_id(layer, index)))
            for _, start, stop in parts:
                try:
                    check_slice(declared.spec, dim, start, stop)
                except FormatError as error:
                    raise InputError(f"layer {name} on {layer.tp_size} tensor-parallel ranks: {error}") from error
            self._parts.append(parts)
        for name, tensor in {n: t for declared in self._declared for n, t in declared.tensors.items()}.items():
            parameter = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            parameter.weight_loader = self._loader(layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def _shard_id(self, layer: Any, index: int) -> ShardId:
        """Return vLLM's id of a weight in a layer that vLLM fuses; None in any other layer."""
        if len(self._names) == 1:
            return None
        return QKV[index] if isinstance(layer, QKVParallelLinear) else index

    def _loader(self, layer: Any, name: str) -> Callable[..., None]:
        """Return `_load` for one tensor of a layer: a function with a name, by which vLLM knows loaders."""

        def load(parameter: nn.Parameter, tensor: Tensor, shard_id: ShardId = None) -> None:
            self._load(layer, name, parameter, tensor, shard_id)

        return load

    def _load(self, layer: Any, name: str, parameter: nn.Parameter, tensor: Tensor, shard_id: ShardId = None) -> None:
        """Load one tensor. When all tensors of a weight are loaded, validate it and keep only this rank's shard.

        Args:
            layer: vLLM's layer.
            name: the tensor's name in the format.
            parameter: the empty parameter.
            tensor: the stored tensor.
            shard_id: which weight of a fused layer it belongs to; None if the layer is not fused.
        Raises:
            CheckpointError: the weight fails validation.
            InputError: all weights have been loaded before.
        """
        if hasattr(layer, "stacked"):
            raise InputError(f"{self._names[0]}: {RELOADED}")
        index = QKV.index(shard_id) if isinstance(shard_id, str) else shard_id or 0
        loaded, declared = self._loaded[index], self._declared[index]
        loaded[name] = tensor.to(parameter.device)  # validated and sliced on that device
        if loaded.keys() != declared.tensors.keys():
            return
        whole = packed_from_tensors(self._names[index], declared, loaded)
        self._loaded[index] = {}
        self._complete.add(index)
        for position, start, stop in self._parts[index]:
            self._shards[position] = slice_weight(whole, _sharded_dim(layer), start, stop)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Stack the shards in the order of the layer's rows, and compile the kernels for every number of tokens.

        Kernels cannot be loaded while vLLM captures a CUDA graph.

        Raises:
            CheckpointError: the checkpoint lacks tensors of a weight of the layer.
            KernelError: no kernel can compute a matmul.
        """
        for index, (name, declared) in enumerate(zip(self._names, self._declared, strict=True)):
            if index not in self._complete:
                missing = sorted(declared.tensors.keys() - self._loaded[index].keys())
                raise CheckpointError(f"layer {name}: the checkpoint lacks tensors {', '.join(missing)}")
        for name in {name for declared in self._declared for name in declared.tensors}:
            delattr(layer, name)
        layer.stacked = StackedLinear([self._shards[position] for position in sorted(self._shards)])
        self._shards, self._complete = {}, set()
        if layer.stacked.device.type == "cuda":
            layer.stacked.prepare(self._tokens, self._dtype, _fusions(layer) if self._fuses else ())
        if self._copies:
            layer.stacked.keep_dense(self._tokens, self._dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``. Each matmul is one custom op under torch.compile."""
        return layer.stacked(x, bias)


def _fusions(layer: Any) -> tuple[tuple[str, str], ...]:
    """Return the prologues and epilogues that the matmul of a layer of vLLM may get."""
    if isinstance(layer, RowParallelLinear):
        return (ADDED,)
    return (GATED,) if isinstance(layer, MergedColumnParallelLinear) else (NORMED,)


def _sharded_dim(layer: Any) -> int:
    """Return the dimension of the weight [N, K] along which vLLM shards a layer."""
    return 1 if isinstance(layer, RowParallelLinear) else 0


def _runs_of_rank(layer: Any, dim: int, size: int, shard_id: ShardId) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous ranges of a weight's rows (columns if ``dim`` is 1) in this rank's shard.

    The indices 0 to ``size`` - 1 are passed through vLLM's weight loader as a weight: what it stores are the indices of
    this rank's rows or columns.

    Args:
        layer: vLLM's layer.
        dim: the dimension that it shards.
        size: the weight's rows or columns.
        shard_id: which weight of a fused layer it is; None if the layer is not fused.
    Yields:
        (first row in this rank's layer, first row of the weight, one past its last row), or columns if ``dim`` is 1.
    """
    length = layer.input_size_per_partition if dim else sum(layer.output_partition_sizes)
    stored = torch.full((1, length) if dim else (length, 1), -1, device="cpu")
    parameter = ModelWeightParameter(data=stored, input_dim=1, output_dim=0, weight_loader=None)
    parameter.tp_rank, parameter.tp_size = layer.tp_rank, layer.tp_size
    indices = torch.arange(size, device="cpu").view((1, -1) if dim else (-1, 1))
    load = getattr(layer, "weight_loader_v2", layer.weight_loader)
    load(parameter, indices, *(() if shard_id is None else (shard_id,)))
    stored = stored.flatten()
    positions = (stored >= 0).nonzero().flatten()
    breaks = ((stored[positions].diff() != 1) | (positions.diff() != 1)).nonzero().flatten() + 1
    for run in positions.tensor_split(breaks):
        yield int(run[0]), int(stored[run[0]]), int(stored[run[-1]]) + 1

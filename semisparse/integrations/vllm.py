"""The adapter to vLLM: with semisparse installed, ``vllm serve DIR`` serves a compressed checkpoint.

vLLM calls `register` in every process (entry point ``vllm.general_plugins``). Each layer loads unsharded tensors in the
disk layout, slices out this tensor-parallel rank's shard, and stacks the weights of a fused layer. To find the rank's
rows or columns, the adapter passes their indices through vLLM's own weight loader as if they were weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.parameter import ModelWeightParameter

from semisparse.checkpoint import METHOD, packed_from_tensors, read_block
from semisparse.errors import CheckpointError, InputError
from semisparse.nn import StackedLinear, slice_weight

QKV = ("q", "k", "v")
"""vLLM's shard ids of a fused QKV layer, in the order of its rows. Other fused layers use 0, 1, ..."""


def register() -> None:
    """Register the quantisation method with vLLM. A second call changes nothing."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SemisparseVllmConfig)


class SemisparseVllmConfig(QuantizationConfig):
    """vLLM's `QuantizationConfig` of a semisparse checkpoint.

    Args:
        layers: the checkpoint's layers by module name, as `read_block` returns them.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = dict(layers)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SemisparseVllmConfig:
        return cls(read_block(config))

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0, for any GPU: each kernel checks for itself where it can run."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files: everything is in config.json."""
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the layers as vLLM renames the checkpoint's modules."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method for a linear layer, ours if it is compressed, else vLLM's; None for any other layer.

        Raises:
            InputError: a layer that is not linear, or a module inside it, is compressed; or only some weights of a
                fused layer are.
        """
        if not isinstance(layer, LinearBase):
            self._refuse_compressed(layer, prefix)
            return None
        names = self._checkpoint_names(prefix)
        compressed = [name for name in names if name in self.layers]
        if not compressed:
            return UnquantizedLinearMethod()
        if len(compressed) < len(names):
            raise InputError(
                f"vLLM fuses {', '.join(names)} into one layer, of which only {', '.join(compressed)} are compressed: "
                "compress all, or add all to the recipe's ignore list"
            )
        return SemisparseLinearMethod({name: self.layers[name] for name in names})

    def _checkpoint_names(self, prefix: str) -> list[str]:
        """Return the checkpoint's layers in a layer of vLLM: several if vLLM fuses what the checkpoint has apart."""
        parent, _, last = prefix.rpartition(".")
        if prefix in self.layers or last not in self.packed_modules_mapping:
            return [prefix]
        return [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping[last]]

    def _refuse_compressed(self, layer: Any, prefix: str) -> None:
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise InputError(
                f"{inside[0]} is compressed, but belongs to a {type(layer).__name__} of vLLM ({prefix}); the adapter "
                "serves linear layers, not experts or the LM head: add it to the recipe's ignore list"
            )


class SemisparseLinearMethod(LinearMethodBase):
    """A linear layer of vLLM with packed weights.

    Args:
        layers: the checkpoint's layers that vLLM's layer contains, by name and in vLLM's order, as `read_block` returns
            them.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._names = list(layers)
        self._declared = list(layers.values())
        self._loaded: list[dict[str, Tensor]] = [{} for _ in layers]  # the tensors of weights that are not complete yet
        self._complete: set[int] = set()  # indices of the weights that are
        self._shards: dict[int, Any] = {}  # by first row (column if row-parallel) in this rank's layer

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
        """Register one empty parameter per tensor name. Its loader receives that tensor, unsharded, of every weight."""
        for name, tensor in {n: t for declared in self._declared for n, t in declared.tensors.items()}.items():
            parameter = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            parameter.weight_loader = partial(self._load, layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def _load(
        self, layer: Any, name: str, parameter: nn.Parameter, tensor: Tensor, shard_id: str | int | None = None
    ) -> None:
        """Load one tensor. When all tensors of a weight are loaded, validate it and keep only this rank's shard.

        Args:
            layer: vLLM's layer.
            name: the tensor's name in the format.
            parameter: the empty parameter.
            tensor: the stored tensor.
            shard_id: which weight of a fused layer it belongs to; None if the layer is not fused.
        Raises:
            CheckpointError: the weight fails validation.
        """
        index = QKV.index(shard_id) if isinstance(shard_id, str) else shard_id or 0
        loaded, declared = self._loaded[index], self._declared[index]
        loaded[name] = tensor.to(parameter.device)  # validated and sliced on that device
        if loaded.keys() != declared.tensors.keys():
            return
        whole = packed_from_tensors(self._names[index], declared, loaded)
        self._loaded[index] = {}
        self._complete.add(index)
        dim = 1 if isinstance(layer, RowParallelLinear) else 0
        for position, start, stop in _runs_of_rank(layer, dim, whole.shape[dim], shard_id):
            self._shards[position] = slice_weight(whole, dim, start, stop)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Stack the shards in the order of the layer's rows.

        Raises:
            CheckpointError: the checkpoint lacks tensors of a weight of the layer.
        """
        for index, (name, declared) in enumerate(zip(self._names, self._declared, strict=True)):
            if index not in self._complete:
                missing = sorted(declared.tensors.keys() - self._loaded[index].keys())
                raise CheckpointError(f"layer {name}: the checkpoint lacks tensors {', '.join(missing)}")
        for name in {name for declared in self._declared for name in declared.tensors}:
            delattr(layer, name)
        layer.stacked = StackedLinear([self._shards[position] for position in sorted(self._shards)])
        self._shards, self._complete = {}, set()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``. Each matmul is one custom op under torch.compile."""
        return layer.stacked(x, bias)


def _runs_of_rank(layer: Any, dim: int, size: int, shard_id: str | int | None) -> Iterator[tuple[int, int, int]]:
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
    numbers = torch.arange(size, device="cpu").view((1, -1) if dim else (-1, 1))
    load = getattr(layer, "weight_loader_v2", layer.weight_loader)
    load(parameter, numbers, *(() if shard_id is None else (shard_id,)))
    stored = stored.flatten()
    positions = (stored >= 0).nonzero().flatten()
    breaks = ((stored[positions].diff() != 1) | (positions.diff() != 1)).nonzero().flatten() + 1
    for run in positions.tensor_split(breaks):
        yield int(run[0]), int(stored[run[0]]), int(stored[run[-1]]) + 1

"""vLLM: with semisparse installed beside it, ``vllm serve DIR`` serves a compressed directory.

vLLM calls `register` in every process (entry point ``vllm.general_plugins``). Every layer takes its tensors whole, as
they lie on disk, keeps this rank's part of them and puts the parts of a fused layer together, whatever the format.
Which rows or columns are this rank's is vLLM's own answer: its loader is given their numbers in the place of weights.
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

from semisparse.checkpoint import METHOD, filled, read_block
from semisparse.errors import CheckpointError, InputError
from semisparse.nn import StackedLinear, cut

QKV = ("q", "k", "v")
"""vLLM's names for the weights of a fused attention layer; those of others are numbered."""


def register() -> None:
    """Tell vLLM about semisparse; calling it again changes nothing."""
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(SemisparseVllmConfig)


class SemisparseVllmConfig(QuantizationConfig):
    """The ``quantization_config`` block as vLLM carries it: what each layer of the checkpoint is."""

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
        """Any: each kernel says itself where it runs."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything stands in config.json."""
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow vLLM in renaming the checkpoint's modules."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Choose how a layer is stored: as packed weights where the checkpoint has them, else as vLLM would.

        Raises:
            InputError: it has them for a layer that is not linear, or for some weights of a fused layer only.
        """
        if not isinstance(layer, LinearBase):
            self._refuse_compressed(layer, prefix)
            return None
        fused = self._fused(prefix)
        compressed = [name for name in fused if name in self.layers]
        if not compressed:
            return UnquantizedLinearMethod()
        if len(compressed) < len(fused):
            raise InputError(
                f"vLLM fuses {', '.join(fused)} into one layer, of which only {', '.join(compressed)} is compressed: "
                "compress all of them, or name all of them in the recipe's ignore"
            )
        return SemisparseLinearMethod({name: self.layers[name] for name in fused})

    def _fused(self, prefix: str) -> list[str]:
        """Name the checkpoint's layers that one of vLLM's holds."""
        parent, _, own = prefix.rpartition(".")
        if prefix in self.layers or own not in self.packed_modules_mapping:
            return [prefix]
        return [f"{parent}.{name}" if parent else name for name in self.packed_modules_mapping[own]]

    def _refuse_compressed(self, layer: Any, prefix: str) -> None:
        inside = [name for name in self.layers if name == prefix or name.startswith(f"{prefix}.")]
        if inside:
            raise InputError(
                f"{inside[0]} is compressed, but vLLM has it in a {type(layer).__name__} ({prefix}), and semisparse "
                "serves only linear layers there, no experts and no heads: name it in the recipe's ignore"
            )


class SemisparseLinearMethod(LinearMethodBase):
    """One of vLLM's linear layers from packed weights.

    Args:
        fused: the declarations of the checkpoint's layers that it holds, in vLLM's order, by name.
    """

    def __init__(self, fused: Mapping[str, Any]) -> None:
        self._names = list(fused)
        self._declared = list(fused.values())
        self._arrived: list[dict[str, Tensor]] = [{} for _ in fused]
        self._parts: dict[int, Any] = {}

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
        """Stand in for every tensor on disk with an empty parameter, whose loader takes the tensor whole."""
        for name, tensor in {n: t for declared in self._declared for n, t in declared.tensors.items()}.items():
            parameter = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            parameter.weight_loader = partial(self._take, layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def _take(
        self, layer: Any, name: str, parameter: nn.Parameter, tensor: Tensor, fused: str | int | None = None
    ) -> None:
        """Keep a tensor; once its weight is whole, check it and keep this rank's part alone.

        Raises:
            CheckpointError: the weight is corrupted, or is not what vLLM's layer takes.
        """
        index = QKV.index(fused) if isinstance(fused, str) else fused or 0
        arrived, declared = self._arrived[index], self._declared[index]
        arrived[name] = tensor.to(parameter.device)  # checked and cut there
        if arrived.keys() != declared.tensors.keys():
            return
        whole = filled(self._names[index], declared, arrived)
        self._arrived[index] = {}
        dim = 1 if isinstance(layer, RowParallelLinear) else 0
        for place, start, stop in _shares(layer, dim, whole.shape[dim], fused):
            self._parts[place] = cut(whole, dim, start, stop)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the parts together in the order of the layer's rows.

        Raises:
            CheckpointError: tensors are missing.
        """
        for name, declared, arrived in zip(self._names, self._declared, self._arrived, strict=True):
            if arrived or not self._parts:
                missing = sorted(declared.tensors.keys() - arrived.keys())
                raise CheckpointError(f"layer {name}: the checkpoint has no {', '.join(missing)}")
        for name in {name for declared in self._declared for name in declared.tensors}:
            delattr(layer, name)
        layer.stacked = StackedLinear([self._parts[place] for place in sorted(self._parts)])
        self._parts = {}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: one opaque operator a product where vLLM traces it."""
        return layer.stacked(x, bias)


def _shares(layer: Any, dim: int, size: int, fused: str | int | None) -> Iterator[tuple[int, int, int]]:
    """Give the runs of a weight's rows (columns, with ``dim`` 1) that this rank keeps, by asking vLLM's own loader.

    Args:
        layer: vLLM's.
        dim: what it cuts.
        size: the weight's rows or columns.
        fused: which of the layer's weights it is, as vLLM says it.
    Returns:
        (place in the layer, first, the one behind the last) for each run.
    """
    length = layer.input_size_per_partition if dim else sum(layer.output_partition_sizes)
    kept = torch.full((1, length) if dim else (length, 1), -1, device="cpu")
    asked = ModelWeightParameter(data=kept, input_dim=1, output_dim=0, weight_loader=None)
    asked.tp_rank, asked.tp_size = layer.tp_rank, layer.tp_size
    numbers = torch.arange(size, device="cpu").view((1, -1) if dim else (-1, 1))
    load = getattr(layer, "weight_loader_v2", layer.weight_loader)
    load(asked, numbers, *(() if fused is None else (fused,)))
    kept = kept.flatten()
    places = (kept >= 0).nonzero().flatten()
    breaks = ((kept[places].diff() != 1) | (places.diff() != 1)).nonzero().flatten() + 1
    for run in places.tensor_split(breaks):
        yield int(run[0]), int(kept[run[0]]), int(kept[run[-1]]) + 1

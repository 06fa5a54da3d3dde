"""vLLM's experts of a mixture with packed weights: loading, and the matmuls of all experts that a step's tokens chose.

vLLM's router chooses the experts. The checkpoint stores two layers per expert, ``gate_up`` and ``down``. Each of the
two is stacked over all experts, and one launch computes the stack's matmul.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from semisparse.checkpoint import packed_from_tensors
from semisparse.errors import CheckpointError, InputError, KernelError
from semisparse.integrations.vllm.settings import RELOADED
from semisparse.nn.stacked_experts import prepare_stacked_experts, stack_experts

if TYPE_CHECKING:
    from semisparse.formats.base import Packed

TENSOR = re.compile(r"(?P<layer>\d+\.(?:gate_up|down))\.(?P<tensor>\w+)")
"""A stored tensor of an expert, named relative to the experts."""

LAYERS = ("gate_up", "down")
"""An expert's linear layers, in call order."""


def is_of_expert(name: str) -> bool:
    """Return whether a layer of the checkpoint, such as ``model.layers.0.mlp.experts.1.gate_up``, is an expert's."""
    return re.fullmatch(r".*\.\d+\.(?:gate_up|down)", name) is not None


def loads_any_name() -> bool:
    """Return whether vLLM passes experts all of their tensors, by itself or since `register_runner` was called."""
    built = op_registry_oot.get(MoERunner.__name__, MoERunner)
    return hasattr(MoERunner, "load_weights") or getattr(built, "loads_packed_experts", False)


def refusal(layer: Any) -> str | None:
    """Return why packed experts of a layer of vLLM cannot be served, or None if they can.

    Args:
        layer: vLLM's `RoutedExperts`.
    """
    parallel = layer.moe_config.moe_parallel_config
    if not loads_any_name():
        return f"vLLM {vllm.__version__} passes experts no tensors of other names than its own: use 0.24 or 0.33"
    if parallel.tp_size > 1 or parallel.use_ep or parallel.dp_size > 1:
        return "packed experts are served on one GPU: serve with --tensor-parallel-size 1, without expert parallelism"
    if layer.activation is not MoEActivation.SILU or layer.moe_config.has_bias or layer.apply_router_weight_on_input:
        return "packed experts are served with the activation silu(gate) * up, without biases, weighted after it"
    return None


class SemisparseExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer of vLLM with packed weights.

    Args:
        layer: vLLM's `RoutedExperts`, which `refusal` takes.
        layers: the experts' layers by name relative to the experts (``0.gate_up``), as `read_block` returns them.
        tokens: maximum number of tokens per step of vLLM.
    """

    def __init__(self, layer: Any, layers: Mapping[str, Packed], tokens: int) -> None:
        super().__init__(layer.moe_config)
        self._prefix, self._count = layer.layer_name, layer.global_num_experts
        self._pairs = tokens * layer.moe_config.experts_per_token
        self.declared = dict(layers)
        self.by_name: list[nn.Module] = []  # whose parameters only give vLLM the tensors' names
        self._loaded: dict[str, dict[str, Tensor]] = {name: {} for name in layers}  # tensors of incomplete weights
        self._packed: dict[str, Packed] = {}
        self._is_loaded = False
        expected = {f"{index}.{name}" for index in range(self._count) for name in LAYERS}
        if missing := sorted(expected - layers.keys()):
            raise InputError(
                f"of the experts {self._prefix}, {missing[0]} is not compressed but others are: compress all experts, "
                "or add all to the recipe's ignore list"
            )

    def create_weights(self, layer: Any, *sizes: Any, **others: Any) -> None:
        """Take over loading: vLLM's own loader expects gate and up as two layers."""
        layer.load_weights = partial(self.load, torch.get_default_device())

    def load(self, device: torch.device, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Load tensors, and validate each weight when its last tensor is loaded.

        Args:
            device: where they are loaded.
            weights: (name relative to the experts, tensor).
        Yields:
            The names.
        Raises:
            CheckpointError: a tensor has an unknown name, or a weight fails validation.
            InputError: all weights have been loaded before.
        """
        if self._is_loaded:
            raise InputError(f"{self._prefix}: {RELOADED}")
        for name, tensor in weights:
            match = TENSOR.fullmatch(name)
            declared = None if match is None else self.declared.get(match["layer"])
            if match is None or declared is None or match["tensor"] not in declared.tensors:
                raise CheckpointError(f"{self._prefix}.{name}: the compressed experts have no such tensor")
            loaded = self._loaded[match["layer"]]
            loaded[match["tensor"]] = tensor.to(device)
            if loaded.keys() == declared.tensors.keys():
                whole = packed_from_tensors(f"{self._prefix}.{match['layer']}", declared, loaded)
                self._packed[match["layer"]] = whole
                self._loaded[match["layer"]] = {}
            yield name

    def process_weights_after_loading(self, layer: Any) -> None:
        """Stack the experts' weights, and compile the kernels for every number of tokens.

        Raises:
            CheckpointError: the checkpoint lacks tensors of an expert.
            KernelError: no kernel computes the experts together.
        """
        self._is_loaded = True
        for named in self.by_name:  # their modules stay: vLLM goes through all modules at this moment
            named._parameters.clear()
        self.by_name = []
        for name, declared in self.declared.items():
            if name not in self._packed:
                missing = sorted(declared.tensors.keys() - self._loaded[name].keys())
                raise CheckpointError(f"layer {self._prefix}.{name}: the checkpoint lacks tensors {', '.join(missing)}")
        try:
            layer.joined = stack_experts(*(self._taken(name) for name in LAYERS))
            if layer.joined.first.packed.device.type == "cuda":  # none can be loaded while a CUDA graph is captured
                prepare_stacked_experts(layer.joined, self._count, self._pairs, self.moe.in_dtype)
        except KernelError as error:
            raise KernelError(
                f"the experts {self._prefix} cannot be computed together: {error}; compress all with one pattern, or "
                "add them to the recipe's ignore list"
            ) from error

    def _taken(self, name: str) -> list[Packed]:
        """Return one layer of all experts, and forget it here."""
        return [self._packed.pop(f"{index}.{name}") for index in range(self._count)]

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: vLLM's own kernels do not run for this layer."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs.

        Args:
            layer: vLLM's `RoutedExperts`.
            x: [tokens, K].
            topk_weights: [tokens, top-k] float32.
            topk_ids: [tokens, top-k] integers.
            shared_experts: unused; vLLM computes them.
            shared_experts_input: unused.
        Returns:
            [tokens, K] in x's dtype.
        """
        y: Tensor = layer.joined(x, topk_ids, topk_weights)
        return y

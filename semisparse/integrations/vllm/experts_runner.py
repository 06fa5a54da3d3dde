"""Loading of packed experts in versions of vLLM whose models look each tensor's name up among their parameters.

vLLM 0.33 passes all tensors of a layer's experts to ``RoutedExperts.load_weights``. In 0.24, models load expert tensors
of vLLM's own names, and any tensor whose name is a parameter's. So the module of the experts gets a parameter for each
stored tensor until the weights are loaded. Its class is replaced by vLLM's own means, `PluggableLayer.register_oot`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from semisparse.integrations.vllm.experts import SemisparseExpertsMethod


class ExpertsRunner(MoERunner):
    """vLLM's module of a layer's experts, with parameters by the names of the stored tensors if these are packed."""

    loads_packed_experts = True
    """What `experts.loads_any_name` looks for: another plugin may have replaced vLLM's class instead."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        method = self.routed_experts.quant_method
        if isinstance(method, SemisparseExpertsMethod):
            add_parameters(self, method)


def add_parameters(runner: nn.Module, method: SemisparseExpertsMethod) -> None:
    """Give a module empty parameters, such as ``0.gate_up.values``, which are loaded as a layer's experts load tensors.

    Args:
        runner: parent of the experts' module.
        method: of the experts; it deletes the parameters when the weights have been loaded.
    """
    device = torch.get_default_device()
    for name, declared in method.declared.items():
        index, _, layer = name.partition(".")
        if not hasattr(runner, index):
            runner.add_module(index, nn.Module())
        named = nn.Module()
        for key, tensor in declared.tensors.items():
            parameter = nn.Parameter(torch.empty(0, dtype=tensor.dtype), requires_grad=False)
            parameter.weight_loader = partial(_load, method, device, f"{name}.{key}")  # type: ignore[attr-defined]
            named.register_parameter(key, parameter)
        runner.get_submodule(index).add_module(layer, named)
        method.by_name.append(named)


def _load(method: SemisparseExpertsMethod, device: torch.device, name: str, parameter: Any, tensor: Tensor) -> None:
    """Load one tensor, as the loader of vLLM's parameters."""
    for _ in method.load(device, [(name, tensor)]):
        pass


def register_runner() -> None:
    """Let vLLM build `ExpertsRunner` where it would build its own class, if its models load experts by names."""
    if not hasattr(MoERunner, "load_weights") and MoERunner.__name__ not in op_registry_oot:
        PluggableLayer.register_oot(ExpertsRunner, name=MoERunner.__name__)

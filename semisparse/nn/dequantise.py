"""Turning packed layers back into the dense layers that they replaced."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError
from semisparse.nn.joined import JoinedLinear, JoinedPart
from semisparse.nn.sparse_experts import SparseExperts
from semisparse.nn.sparse_linear import SparseLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def dequantise_layers(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Replace every packed layer by a dense one with the unpacked weight; separate joined layers and fuse experts.

    Args:
        model: contains `SparseLinear` or joined layers.
        dtype: dtype of the dense weights and biases.
    Returns:
        The names of the layers that were replaced.
    Raises:
        InputError: a packed layer's module in transformers' own model is not linear.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype  # save_pretrained leaves its name there, and Apertus' activation wants the dtype
    with torch.device("meta"):
        skeleton = type(model)(config)
    names = _fuse_experts(model, skeleton, dtype)
    packed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseLinear | JoinedPart) and not isinstance(module, JoinedLinear)
    }
    for name, layer in packed.items():
        dense = skeleton.get_submodule(name)
        if not isinstance(dense, nn.Linear | Conv1D):
            raise InputError(f"layer {name} is a {type(dense).__name__}, expected a linear layer")
        weight = layer.weight.to(dtype)
        dense.weight = nn.Parameter(weight.T.contiguous() if isinstance(dense, Conv1D) else weight, requires_grad=False)
        if layer.bias is not None:
            dense.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        model.set_submodule(name, dense.train(model.training))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, JoinedLinear):
                delattr(parent, name)
    return names + list(packed)


def _fuse_experts(model: nn.Module, skeleton: nn.Module, dtype: torch.dtype) -> list[str]:
    """Replace every `SparseExperts` by the fused module that it came from; return the names of its packed layers."""
    names = []
    for name, experts in list(model.named_modules()):
        if isinstance(experts, SparseExperts):
            names += [f"{name}.{layer}" for layer in experts.packed_layers()]
            fused = experts.fuse_into(skeleton.get_submodule(name), dtype)
            model.set_submodule(name, fused.train(experts.training))
    return names

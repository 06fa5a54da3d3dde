"""Linear layers of a model: which modules count, their weight as [N, K], and putting a packed one in their place."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError
from semisparse.formats.base import Packed
from semisparse.nn.sparse_linear import SparseLinear


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a dense linear layer; GPT-2's ``Conv1D``, which stores [K, N], is one."""
    return isinstance(module, (nn.Linear, Conv1D))


def weight_of(module: nn.Module) -> Tensor:
    """Give a linear layer's weight as a view [N, K]; writing to it changes the layer."""
    if not is_linear(module):
        raise InputError(f"expected a linear layer, got {type(module).__name__}")
    weight = module.get_parameter("weight").data
    return weight.T if isinstance(module, Conv1D) else weight


def swap_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Put a weight [N, K] in the place of a linear layer's, without copying, and give the one that was there."""
    before = weight_of(module)
    module.get_parameter("weight").data = weight.T if isinstance(module, Conv1D) else weight
    return before


def replace_linear(model: nn.Module, name: str, packed: Packed) -> SparseLinear:
    """Put a packed weight in the place of the linear layer ``name``; its bias stays.

    Raises:
        InputError: ``name`` is no linear layer of the model, or its shape is not the packed weight's.
    """
    try:
        dense = model.get_submodule(name)
    except AttributeError as error:
        raise InputError(f"the model has no layer {name!r}") from error
    shape = tuple(weight_of(dense).shape)
    if shape != packed.shape:
        raise InputError(f"layer {name} has N, K = {shape}, the packed weight {packed.shape}")
    bias = getattr(dense, "bias", None)
    sparse = SparseLinear(packed, None if bias is None else bias.data)
    model.set_submodule(name, sparse)
    return sparse

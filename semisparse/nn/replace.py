"""Linear layers of a model: which modules count as linear, their weight as [N, K], and replacing them."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError
from semisparse.formats.base import Packed
from semisparse.nn.sparse_linear import SparseLinear


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a dense linear layer: ``nn.Linear``, or GPT-2's ``Conv1D``, which stores [K, N]."""
    return isinstance(module, (nn.Linear, Conv1D))


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear layer's weight as a view [N, K]. Writing to it changes the layer.

    Raises:
        InputError: the module is no linear layer.
    """
    if not is_linear(module):
        raise InputError(f"expected a linear layer, got {type(module).__name__}")
    weight = module.get_parameter("weight").data
    return weight.T if isinstance(module, Conv1D) else weight


def swap_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Replace a linear layer's weight [N, K] without copying, and return the previous one."""
    previous = weight_of(module)
    module.get_parameter("weight").data = weight.T if isinstance(module, Conv1D) else weight
    return previous


def replace_linear(model: nn.Module, name: str, packed: Packed) -> SparseLinear:
    """Replace the linear layer ``name`` by a `SparseLinear` with a packed weight [N, K] and the layer's bias.

    Raises:
        InputError: the model has no linear layer ``name``, or its shape is not [N, K].
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

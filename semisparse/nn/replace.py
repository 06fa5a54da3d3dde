"""Linear layers of a model: which modules count as linear, their weight as [N, K], and replacing them."""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from semisparse.errors import InputError
from semisparse.formats.base import Packed
from semisparse.nn.sparse_linear import SparseLinear

LINEAR_CLASSES = (nn.Linear, Conv1D)
"""``nn.Linear``, and GPT-2's ``Conv1D``, which stores [K, N]. Their subclasses may compute something else."""

PROBE_TOKENS = 3
"""Random tokens on which a module is compared with ``x @ w.T + bias``."""

_probed: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a module whose class has a forward of its own computes ``x @ w.T + bias``."""


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x @ w.T + bias`` with a dense weight.

    A subclass of `LINEAR_CLASSES` with a forward of its own is called once, as a copy with random weights.
    """
    if not isinstance(module, LINEAR_CLASSES):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if module not in _probed:
        _probed[module] = _computes_linear(module)
    return _probed[module]


@torch.no_grad()
def _computes_linear(module: nn.Module) -> bool:
    probe = copy.deepcopy(module).eval()
    on_meta = weight_of(probe).device.type == "meta"
    probe = (probe.to_empty(device="cpu") if on_meta else probe.cpu()).float()
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
        weight, bias = weight_of(probe), getattr(probe, "bias", None)
        x = torch.randn(PROBE_TOKENS, weight.shape[1], generator=generator, dtype=torch.float32)
        try:
            y = probe(x)
        except Exception:  # it takes other arguments, so it is not a plain linear layer
            return False
        expected = F.linear(x, weight, bias)
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-3)


def weight_of(module: nn.Module) -> Tensor:
    """Return a linear layer's weight as a view [N, K]. Writing to it changes the layer.

    Raises:
        InputError: the module is none of `LINEAR_CLASSES`.
    """
    if not isinstance(module, LINEAR_CLASSES):
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

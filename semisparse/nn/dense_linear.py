"""Dense layers for an engine: a model's own, and dense copies of packed ones for the M at which these are slower."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from semisparse.formats.base import Packed
from semisparse.formats.product import linear, measured_speedup, prepare_product
from semisparse.nn.dense_copy import copy_pays
from semisparse.nn.sparse_linear import SparseLinear


class DenseLinear:
    """Dense linear layers on one input as one layer in format ``dense``; their weights become views of its weight.

    Args:
        layers: with biases or without.

    Attributes:
        packed: the layers' weights, one below another.
        bias: their biases likewise, or None.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        weights = [layer.get_parameter("weight") for layer in layers]
        rows = [len(weight) for weight in weights]
        whole = weights[0].data if len(layers) == 1 else torch.cat([weight.data for weight in weights])
        self.packed = Packed.of_dense(whole)
        self.bias: Tensor | None = None
        if any(getattr(layer, "bias", None) is not None for layer in layers):
            biases = [getattr(layer, "bias", None) for layer in layers]
            filled = [w.new_zeros(len(w)) if b is None else b.data for w, b in zip(weights, biases, strict=True)]
            self.bias = torch.cat(filled)
        if len(layers) > 1:
            for weight, part in zip(weights, whole.split(rows), strict=True):
                weight.data = part

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)


def slower_layers(model: nn.Module, m: int, dtype: torch.dtype, copied: Sequence[str] = ()) -> list[str]:
    """Return the names of the packed layers that are slower than dense, by the tuned tables of their device.

    Args:
        model: its layers.
        m: rows of x.
        dtype: dtype of x.
        copied: glob patterns of the names of layers that have a dense copy, which are left out.
    """
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, SparseLinear)
        and not any(fnmatchcase(name, pattern) for pattern in copied)
        and (measured_speedup(layer.packed, m, dtype) or 1) < 1
    ]


class DenseCopy:
    """A dense copy of a packed layer, beside it.

    Args:
        layer: the packed layer.
        dtype: dtype of x, which the copy gets.
    """

    def __init__(self, layer: SparseLinear, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype
        self._packed = Packed.of_dense(layer.packed.unpack().to(dtype))

    @staticmethod
    def bytes_of(layer: SparseLinear, dtype: torch.dtype) -> int:
        """Return the bytes that a copy takes."""
        return layer.out_features * layer.in_features * dtype.itemsize

    def pays(self, m: int) -> bool:
        """Return whether the copy is faster than the layer for ``m`` tokens."""
        return copy_pays(self._layer.packed, m, self._dtype)

    def prepare(self, m: int) -> None:
        """Compile and load the GPU kernels for ``m`` tokens."""
        prepare_product(self._packed, m, self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._packed, self._layer.bias)

"""A decoder layer's linear layers, fused with the operations just before and after them if there is a kernel for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from semisparse.engine.ops import Columns, rms_norm, silu_mul
from semisparse.formats.kernel import FusedOperands, FusedProduct
from semisparse.nn import (
    JoinedLinear,
    SparseLinear,
    constant_linear,
    fused_product,
    permutation_of,
    permuted_linear,
    prepare_product,
    structure_of,
)
from semisparse.nn.dense_linear import DenseCopy, DenseLinear
from semisparse.nn.fused_linear import GATED, is_aligned
from semisparse.nn.joined import is_intercepted
from semisparse.runtime.device import device_facts
from semisparse.runtime.expand_gemm import Permutation, PermutedX

if TYPE_CHECKING:
    from semisparse.formats.base import Packed


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: its weight [C], aligned to 16 bytes, and epsilon."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Stream:
    """The residual stream [M, C]: ``x``, or ``x`` + ``delta`` if the sum has not been computed yet."""

    x: Tensor
    delta: Tensor | None = None


class Projection:
    """Linear layers on one input as one matmul: joined by `nn.join_layers`, or dense layers concatenated here.

    Args:
        layers: in the order of the output's columns.
        parent: the module that holds them.
        fusion: NORMED, GATED or ADDED.
    """

    def __init__(self, layers: Sequence[nn.Module], parent: nn.Module, fusion: tuple[str, str]) -> None:
        self._fusion = fusion
        joined = [module for module in parent.children() if isinstance(module, JoinedLinear)]
        widths = [rows_of(layer) for layer in layers]
        starts = tuple(sum(widths[:i]) for i in range(len(widths)))
        self.columns = Columns(starts, sum(widths))
        self._parts: list[DenseLinear | nn.Module]
        if joined and len(joined[0].extents) == len(layers):
            self._parts = [joined[0]]
            self.columns = Columns(tuple(start for start, _ in joined[0].extents), joined[0].out_features)
        elif all(type(layer) is nn.Linear for layer in layers):
            self._parts = [DenseLinear(layers)]
        else:
            self._parts = [DenseLinear([layer]) if type(layer) is nn.Linear else layer for layer in layers]
        self._whole = self._find_whole()
        self._copies: dict[int, DenseCopy] = {}

    @property
    def weights(self) -> list[Packed]:
        """The packed weights."""
        return [part.packed for part in self._parts if isinstance(part, DenseLinear | SparseLinear)]

    @property
    def structure(self) -> Hashable:
        """What `prepare` depends on: projections of equal structure take the same kernels."""
        specs = tuple(structure_of(packed.spec) for packed in self.weights)
        return self._fusion, self._whole is None, specs, tuple(self._copies)

    def prepare(self, m: int, dtype: torch.dtype) -> None:
        """Compile and load the GPU kernels for ``m`` tokens."""
        if self._fused(m, dtype) is not None:
            return
        for index, part in enumerate(self._parts):
            copy = self._copy_for(index, m)
            if copy is not None:
                copy.prepare(m)
            elif isinstance(part, DenseLinear | SparseLinear):
                constant = part is self._whole and isinstance(part, SparseLinear)
                prepare_product(part.packed, m, dtype, constant)

    @property
    def copyable(self) -> dict[int, SparseLinear]:
        """The packed layers that a dense copy may compute, by their index: those whose calls nothing intercepts."""
        return {
            index: part
            for index, part in enumerate(self._parts)
            if isinstance(part, SparseLinear) and part.kernel == "auto" and not is_intercepted(part)
        }

    def keep_dense(self, dtype: torch.dtype) -> None:
        """Copy the packed layers to dense weights in a dtype, for the M at which these are faster."""
        self._copies = {index: DenseCopy(layer, dtype) for index, layer in self.copyable.items()}

    def _copy_for(self, index: int, m: int) -> DenseCopy | None:
        """Return the dense copy that computes a part for ``m`` tokens, or None if the part itself does."""
        copy = self._copies.get(index)
        return copy if copy is not None and copy.pays(m) else None

    def _fused(self, m: int, dtype: torch.dtype) -> FusedProduct | None:
        """Return the projection with its prologue and epilogue as one kernel, or None if there is none."""
        return None if self._whole is None else fused_product(self._whole.packed, m, dtype, *self._fusion)

    def _find_whole(self) -> DenseLinear | SparseLinear | None:
        """Return the one layer that computes the projection if it may be fused, else None."""
        whole = self._parts[0] if len(self._parts) == 1 else None
        if not isinstance(whole, DenseLinear | SparseLinear) or device_facts(whole.packed.device).kind != "cuda":
            return None
        if isinstance(whole, SparseLinear) and (whole.kernel != "auto" or is_intercepted(whole)):
            return None
        if self._fusion == GATED and self.columns.starts != (0, self.columns.width // 2):
            return None
        # Unaligned tensors would be copied at each call, and a fused kernel reads its weight before
        # griddepcontrol.wait: it could read the copies before they are written.
        return whole if all(map(is_aligned, whole.packed.tensors.values())) else None

    def permutation(self, m: int, dtype: torch.dtype) -> Permutation | None:
        """Return the order in which the projection's kernel reads ``m`` tokens; None if it takes them as they are.

        Whoever computes the tokens may write them in this order. Otherwise a kernel of its own permutes them.
        """
        if not isinstance(self._whole, SparseLinear) or self._copy_for(0, m) is not None:
            return None
        return permutation_of(self._whole.packed, m, dtype)

    def __call__(self, x: Tensor | PermutedX) -> Tensor:
        """Apply the projection alone: [M, K] to [M, columns.width]."""
        if isinstance(x, PermutedX):
            assert self._whole is not None
            return permuted_linear(x, self._whole.packed, self._whole.bias)
        if self.permutation(len(x), x.dtype) is not None:
            assert self._whole is not None
            return constant_linear(x, self._whole.packed, self._whole.bias)
        outputs = [(self._copy_for(index, len(x)) or part)(x) for index, part in enumerate(self._parts)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def normed(self, stream: Stream, norm: Norm) -> tuple[Stream, Tensor]:
        """Normalise the residual stream and apply the projection.

        Returns:
            The stream as one tensor, and [M, columns.width].
        """
        if stream.delta is None:
            fused = self._fused(len(stream.x), stream.x.dtype)
            if fused is not None:
                return stream, self._call(fused, stream.x, FusedOperands(norm.weight, norm.epsilon))
        return self._normed(stream, norm)

    def _normed(self, stream: Stream, norm: Norm) -> tuple[Stream, Tensor]:
        """Compute `normed` in several kernels."""
        permutation = self.permutation(len(stream.x), stream.x.dtype)
        total, hidden = rms_norm(stream.x, norm.weight, norm.epsilon, stream.delta, permutation)
        return Stream(total), self(hidden)

    def normed_and_gated(
        self, stream: Stream, norm: Norm, width: int, down: Projection
    ) -> tuple[Stream, Tensor | PermutedX]:
        """Normalise the residual stream, apply the gate and up projections, and combine them.

        Args:
            stream: the residual stream.
            norm: applied to it.
            width: columns of gate, and of up.
            down: the projection that takes the result.
        Returns:
            The stream as one tensor, and ``silu(gate) * up``, [M, width], perhaps in the order that ``down`` reads.
        """
        if stream.delta is None:
            fused = self._fused(len(stream.x), stream.x.dtype)
            if fused is not None:
                return stream, self._call(fused, stream.x, FusedOperands(norm.weight, norm.epsilon))
        total, both = self._normed(stream, norm)
        return total, silu_mul(both, self.columns, width, down.permutation(len(both), both.dtype))

    def added(self, x: Tensor | PermutedX, stream: Stream) -> Stream:
        """Apply the projection to [M, K] and add the result to the residual stream, or leave it as ``delta``."""
        if isinstance(x, PermutedX):
            return Stream(stream.x, self(x))
        fused = self._fused(len(x), x.dtype)
        if fused is None or stream.delta is not None:
            return Stream(stream.x, self(x))
        return Stream(self._call(fused, x, FusedOperands(residual=stream.x)))

    def _call(self, fused: FusedProduct, x: Tensor, operands: FusedOperands) -> Tensor:
        assert self._whole is not None
        return fused(x, self._whole.packed, self._whole.bias, operands)


def rows_of(layer: nn.Module) -> int:
    """Return the output features of a linear layer."""
    count = layer.out_features
    assert isinstance(count, int)
    return count

"""A packed weight with a dense copy beside it, for the numbers of tokens at which the dense matmul is faster."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed
from semisparse.formats.kernel import bucket_of
from semisparse.formats.product import linear, measured_speedup, packed_of
from semisparse.nn.sparse_linear import SparseLinear

MANY_TOKENS = {1 << 24: 64, 0: 17}
"""Tokens from which a dense copy computes a weight that no tuned table of this device has, by minimum N * K, the
largest first. On an H200 formats are faster than dense at fewer, as a rule, and as fast or slower at more. In
qwen2.5-1.5b's layers, most of which are smaller, 32 tokens take 1.3 to 1.4 times as long as dense
(results/h200/vllm.csv)."""


def copy_pays(packed: Packed, m: int, dtype: torch.dtype) -> bool:
    """Return whether a dense copy of a weight is faster than the packed weight, for ``m`` rows of x in ``dtype``."""
    speedup = measured_speedup(packed, m, dtype)
    if speedup is not None:
        return speedup < 1
    size = math.prod(packed.shape)
    return m >= next(tokens for fewest, tokens in MANY_TOKENS.items() if size >= fewest)


class CopiedLinear(SparseLinear):
    """A packed layer that keeps a dense copy, and computes with it where `copy_pays`.

    ``state_dict`` has the packed weight alone; the copy is made anew when another weight is loaded.

    Args:
        packed: the weight [N, K], on its device.
        dtype: dtype of x, which the copy gets.
    """

    dense: Tensor
    """[N, K], the copy."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        super().__init__(packed)
        self.register_buffer("dense", packed.unpack().to(dtype), persistent=False)

    @staticmethod
    def pays(packed: Packed, tokens: int, dtype: torch.dtype) -> bool:
        """Return whether a copy would compute any step of 1 to ``tokens`` tokens."""
        return any(copy_pays(packed, m, dtype) for m in {bucket_of(m) for m in range(1, tokens + 1)})

    def _set_packed(self, packed: Packed) -> None:
        super()._set_packed(packed)
        self._copy()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._copy()

    def _copy(self) -> None:
        """Make the copy anew, once there is one."""
        if "dense" in self._buffers:
            self.dense = self.packed.unpack().to(self.dense.dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``; torch.compile sees one operator for any number of tokens.

        Gradients reach x and the bias.

        Args:
            x: [..., K] in the copy's dtype.
            bias: [N] or None.
        Returns:
            [..., N] in x's dtype.
        """
        packed, rows = self.packed, x.reshape(-1, self.in_features)
        tensors = [packed.tensors[name] for name in sorted(packed.tensors)]
        y: Tensor = torch.ops.semisparse.linear_or_copy(rows, tensors, bias, packed.spec.json, self.kernel, self.dense)
        return y.reshape(*x.shape[:-1], self.out_features)


_library = torch.library.Library("semisparse", "FRAGMENT")
_library.define(
    "linear_or_copy(Tensor x, Tensor[] tensors, Tensor? bias, str spec, str kernel, Tensor dense) -> Tensor"
)


def _operator(x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str, kernel: str, dense: Tensor) -> Tensor:
    packed = packed_of(spec, tensors)
    if copy_pays(packed, x.shape[0], x.dtype):
        return F.linear(x, dense, None if bias is None else bias.to(x.dtype))
    return linear(x, packed, bias, kernel)


def _operator_fake(
    x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: str, kernel: str, dense: Tensor
) -> Tensor:
    return x.new_empty(x.shape[0], dense.shape[0])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, _, _, _, dense = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(dense)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, from the dense copy, and of the bias."""
    (dense,) = ctx.saved_tensors
    to_x = grad @ dense.to(grad.dtype) if ctx.needs_input_grad[0] else None
    return to_x, [None] * ctx.count, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None, None


_library.impl("linear_or_copy", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("semisparse::linear_or_copy", _operator_fake, lib=_library)
torch.library.register_autograd(
    "semisparse::linear_or_copy", _operator_backward, setup_context=_keep_for_backward, lib=_library
)

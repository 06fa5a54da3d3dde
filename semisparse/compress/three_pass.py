"""Float32 matmuls on a GPU's bfloat16 tensor cores, as the sum of three products of high and low halves.

``x = high + low`` with both in bfloat16 leaves out at most 2^-17 of x, and ``high @ high + high @ low + low @ high``
leaves out ``low @ low``. The relative error of one term ``x[k] * w[k]`` of a dot product is 2^-18 in root mean square,
and at most some 2^-15. One bfloat16 product has 2^-9 and 2^-7, TF32 2^-12 and 2^-10. The three products are one GEMM
with three times the K and float32 accumulators. Without tensor cores a float32 matmul takes four times as long on an
H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LARGE = 1 << 30
"""Products of numbers in a linear layer's matmul from which on it is taken in three bfloat16 products: a smaller one
takes less time in float32 than the launches of the three."""


class ThreePassLinear(TorchFunctionMode):
    """A mode in which ``F.linear`` of float32 tensors on a GPU sums three bfloat16 products, as do its gradients.

    An x of one dimension is left to torch, and so is what has fewer than `LARGE` products.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_linear if func is F.linear else func)(*args, **kwargs or {})


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    small = x.numel() * len(weight) < LARGE
    if small or not (x.is_cuda and x.dim() > 1 and x.dtype == weight.dtype == torch.float32):
        return F.linear(x, weight, bias)
    multiply = linear_with_gradients if torch.is_grad_enabled() else _times
    y = multiply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, [M, N] float32, as three products."""
    return _sum(_high_high_low(x, 1), _low_high_high(weight, 1).T)


class _LinearFunction(torch.autograd.Function):
    """`_times`, whose gradients are sums of three products, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _times(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = _sum(_high_high_low(slope, 1), _low_high_high(weight, 0)) if ctx.needs_input_grad[0] else None
        return of_x, outer_sum(slope, x) if ctx.needs_input_grad[1] else None


def linear_with_gradients(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, [M, N] float32, of x [M, K] and weight [N, K]: as three products, like its gradients."""
    y: Tensor = _LinearFunction.apply(x, weight)
    return y


def outer_sum(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.T @ right``, [M, N] float32, for left [tokens, M] and right [tokens, N], as three products."""
    return _sum(_high_high_low(left, 0).T, _low_high_high(right, 0))


def multiplier(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of x [M, K] that returns ``x @ matrix``, for float32 on a GPU as three products.

    The matrix, [K, N], is split once.
    """
    if not (matrix.is_cuda and matrix.dtype == torch.float32):
        return lambda x: x @ matrix
    right = _low_high_high(matrix, 0)
    return lambda x: _sum(_high_high_low(x, 1), right)


def _high_high_low(x: Tensor, dim: int) -> Tensor:
    """Return the halves high, high and low concatenated along the summed dimension: the left operand of `_sum`."""
    return _halves(x, dim, low_first=False)


def _low_high_high(x: Tensor, dim: int) -> Tensor:
    """Return the halves low, high and high concatenated along the summed dimension: the right operand of `_sum`."""
    return _halves(x, dim, low_first=True)


def _halves(x: Tensor, dim: int, low_first: bool) -> Tensor:
    if x.is_cuda and x.dtype == torch.float32 and find_spec("triton"):
        from semisparse.compress.three_pass_triton import split

        return split(x, dim, low_first)
    high = x.bfloat16()
    low = (x - high).bfloat16()
    return torch.cat((low, high, high) if low_first else (high, high, low), dim)


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of bfloat16 tensors, summed and returned in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()

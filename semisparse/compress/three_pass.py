"""Float32 matmuls on a GPU's bfloat16 tensor cores, as the sum of three products of high and low halves.

``x = high + low`` with both in bfloat16 leaves out at most 2^-17 of x, and ``high @ high + high @ low + low @ high``
leaves out ``low @ low``. The relative error of one term ``x[k] * w[k]`` of a dot product is 2^-18 in root mean square,
and at most some 2^-15. One bfloat16 product has 2^-9 and 2^-7, TF32 2^-12 and 2^-10. The three products are one GEMM
with three times the K and float32 accumulators. Without tensor cores a float32 matmul takes four times as long on an
H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class ThreePassLinear(TorchFunctionMode):
    """A mode in which, where autograd is off, ``F.linear`` of float32 tensors on a GPU sums three bfloat16 products.

    An x of one dimension is left to torch.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not torch.is_grad_enabled():
            return _linear(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (x.is_cuda and x.dim() > 1 and x.dtype == weight.dtype == torch.float32):
        return F.linear(x, weight, bias)
    y = _sum(_high_high_low(x.flatten(0, -2), 1), _low_high_high(weight, 1).T).unflatten(0, x.shape[:-1])
    return y if bias is None else y.add_(bias)


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
    high, low = _halves(x)
    return torch.cat((high, high, low), dim)


def _low_high_high(x: Tensor, dim: int) -> Tensor:
    """Return the halves low, high and high concatenated along the summed dimension: the right operand of `_sum`."""
    high, low = _halves(x)
    return torch.cat((low, high, high), dim)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.bfloat16()
    return high, (x - high).bfloat16()


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of bfloat16 tensors, summed and returned in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()

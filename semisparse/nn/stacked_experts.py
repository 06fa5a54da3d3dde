"""Experts of a mixture from packed weights alone, for frameworks that have a router and a module of experts already."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisparse.errors import KernelError
from semisparse.formats.base import Packed, get_format
from semisparse.formats.kernel import bucket_of, in_parallel
from semisparse.nn.experts_product import experts_product
from semisparse.nn.joined import JoinedLinear
from semisparse.nn.joined_experts import JoinedExperts
from semisparse.nn.sparse_experts import Gating
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacking import stack_with_padding


class SiluMul(nn.Module):
    """``silu(gate) * up``: [tokens, 2 N] -> [tokens, N], the gate in the first half of the columns."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def stack_experts(gate_up: Sequence[Packed], down: Sequence[Packed]) -> JoinedExperts:
    """Stack the layers of all experts, gated by SiLU, for the matmuls of those that a step's tokens choose.

    Args:
        gate_up: each expert's first layer, [2 N, K], the gate's rows first.
        down: each expert's second layer, [K, N].
    Raises:
        KernelError: the experts' weights cannot be stacked.
    """
    first, second = _stacked(gate_up), _stacked(down)
    return JoinedExperts(first, second, cast(Gating, SiluMul()), len(gate_up))


def _stacked(weights: Sequence[Packed]) -> JoinedLinear:
    stack = stack_with_padding(weights)
    if stack is None or stack.shape[0] != len(weights) * weights[0].shape[0]:
        raise KernelError("they differ in format or pattern, or their rows would need padding between the experts")
    arranged = get_format(stack.spec.format).arrange(stack, stack.device.type)
    return JoinedLinear([SparseLinear(weight) for weight in weights], arranged)


def prepare_stacked_experts(experts: JoinedExperts, count: int, pairs: int, dtype: torch.dtype) -> None:
    """Compile and load, in parallel, the kernels of 1 to ``pairs`` pairs of a token and an expert.

    Args:
        experts: from `stack_experts`, on a GPU.
        count: number of experts.
        pairs: maximum number of pairs.
        dtype: dtype of x.
    Raises:
        KernelError: no kernel computes the experts together.
    """
    buckets = sorted({bucket_of(m) for m in range(1, pairs + 1)})
    parts = (experts.first.packed, "silu_mul"), (experts.second.packed, "none")
    in_parallel(partial(_prepare, packed, count, m, dtype, fused) for packed, fused in parts for m in buckets)


def _prepare(packed: Packed, count: int, pairs: int, dtype: torch.dtype, epilogue: str) -> None:
    if experts_product(packed, count, pairs, dtype, epilogue) is None:
        raise KernelError(f"format {packed.spec.format} has no kernel that computes {count} experts together")

"""A packed matmul with its prologue and epilogue as one torch operator, for compilers that fuse a traced graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, WeightSpec, get_format
from semisparse.formats.kernel import MAX_FUSED_TOKENS, FusedOperands, Kernel, bucket_of
from semisparse.formats.product import fused_product, linear, packed_of

NORMED, GATED, ADDED = ("rms_norm", "none"), ("rms_norm", "silu_mul"), ("none", "add")
"""Prologue and epilogue, named as in `Problem`, of the layers of a decoder layer: query, key and value; gate and up;
and those whose output is added to the residual stream."""

__all__ = [
    "ADDED",
    "GATED",
    "MAX_FUSED_TOKENS",
    "NORMED",
    "can_fuse",
    "fused_linear",
    "has_fused_kernels",
    "is_aligned",
    "packed_of",
]

_library = torch.library.Library("semisparse", "FRAGMENT")
_library.define(
    "fused_linear(Tensor x, Tensor[] tensors, Tensor? bias, str spec, Tensor? norm_weight, float epsilon, "
    "Tensor? residual, bool gated) -> Tensor"
)


def fused_linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute ``residual + rms_norm(x) @ w.T + bias``, or ``silu_mul`` of it, by one kernel if the format has one.

    Args:
        x: [M, K], on the weight's device.
        packed: a weight [N, K] that no kernel on the stream writes: it may be read before the preceding kernel ends.
        bias: [N] or None.
        norm_weight: [K], of RMSNorm, or None: x is not normalised.
        epsilon: of RMSNorm.
        residual: [M, N], added to the result, or None.
        gated: whether to return SiLU of the first half of the columns times the second half.
    Returns:
        [M, N], or [M, N / 2] if ``gated``, in x's dtype.
    """
    fusion = "none" if norm_weight is None else "rms_norm", _epilogue(residual, gated)
    product = None if fusion == ("none", "none") else fused_product(packed, x.shape[0], x.dtype, *fusion)
    operands = (x, norm_weight, residual, *packed.tensors.values())
    if product is not None and all(map(is_aligned, operands)):
        return product(x, packed, bias, FusedOperands(norm_weight, epsilon, residual))
    if norm_weight is not None:
        wide = x.float()
        x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * norm_weight
    y = linear(x, packed, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up
    return y if residual is None else y + residual


def _epilogue(residual: Tensor | None, gated: bool) -> str:
    return "silu_mul" if gated else "none" if residual is None else "add"


def is_aligned(tensor: Tensor | None) -> bool:
    """Return whether a tensor is contiguous and begins at a multiple of 16 bytes, as fused kernels read it."""
    return tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)


def can_fuse(packed: Packed, dtype: torch.dtype, fusion: tuple[str, str]) -> bool:
    """Return whether one kernel computes a matmul with its prologue and epilogue, for 1 to `MAX_FUSED_TOKENS` tokens.

    The kernels are compiled and loaded.

    Args:
        packed: only its spec and device matter.
        dtype: dtype of x.
        fusion: prologue and epilogue.
    """
    buckets = sorted({bucket_of(m) for m in range(1, MAX_FUSED_TOKENS + 1)})
    return all(fused_product(packed, m, dtype, *fusion) is not None for m in buckets)


def has_fused_kernels(formats: Iterable[str]) -> bool:
    """Return whether a format, of those named, has a kernel with a prologue or an epilogue for some of its weights."""
    return any(kernel.fuse is not Kernel.fuse for name in formats for kernel in get_format(name).kernels)


def _operator(
    x: Tensor,
    tensors: list[Tensor],
    bias: Tensor | None,
    spec: str,
    norm_weight: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    return fused_linear(x, packed_of(spec, tensors), bias, norm_weight, epsilon, residual, gated)


def _operator_fake(
    x: Tensor,
    tensors: list[Tensor],
    bias: Tensor | None,
    spec: str,
    norm_weight: Tensor | None,
    epsilon: float,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], WeightSpec.from_json(spec).shape[0] // (2 if gated else 1))


_library.impl("fused_linear", _operator, "CompositeExplicitAutograd")
torch.library.register_fake("semisparse::fused_linear", _operator_fake, lib=_library)

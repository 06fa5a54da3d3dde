"""Storing a weight densely: as it is, or with 8-bit or 4-bit values and scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec
from semisparse.formats.dense import int4
from semisparse.formats.kernel import Pass, Problem, fused_cost
from semisparse.patterns import Pattern, VectorNM
from semisparse.quant.symmetric import FP8_MAX, quantise_rows

QUANTISED = ("int8", "fp8", "fp8_tensor", "int4")
"""Symmetric with a scale a row (int8, fp8), one scale in all (fp8_tensor), scale and zero each 32 columns (int4)."""

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_tensor": torch.float8_e4m3fn}

UNITS = {"int8": "tensor int8", "fp8": "tensor fp8", "fp8_tensor": "tensor fp8"}


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Give the stored tensors of the kind that ``params`` names; none means the weight as it is."""
    kind = _kind(spec.params)
    if kind is None:
        return (TensorSpec("values", None, ("N", "K"), split_n=0, split_k=1),)
    if kind == "int4":
        return int4.SPECS
    scale = TensorSpec("scale", torch.float32, ("scales",), split_n=None if kind == "fp8_tensor" else 0)
    return (TensorSpec("values", DTYPES[kind], ("N", "K"), split_n=0, split_k=1), scale)


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Give the number of scales and of int4 tiles."""
    n, k = spec.shape
    return {"scales": 1 if _kind(spec.params) == "fp8_tensor" else n, **int4.counts(n, k)}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Give the rows and columns that a part of the tensors may start at, so that it obeys the pattern, too."""
    if _kind(spec.params) == "int4":
        return int4.ROWS, int4.COLUMNS
    return (spec.pattern.length if isinstance(spec.pattern, VectorNM) else 1), spec.pattern.step


def pack_weight(weight: Tensor, pattern: Pattern, kind: str | None = None) -> tuple[Params, dict[str, Tensor]]:
    """Store a weight.

    Args:
        weight: [N, K].
        kind: None for the weight as it is, or one of `QUANTISED`.
    Raises:
        FormatError: ``kind`` is unknown, or int4 cannot tile this shape.
    """
    params = Params() if kind is None else Params(kind=kind)
    weight = weight.detach()
    if _kind(params) is None:
        return params, {"values": weight.contiguous() + 0.0}  # -0.0 becomes +0.0, as in every format
    if kind == "int4":
        return params, int4.pack(weight)
    if kind == "fp8_tensor":
        amax = weight.abs().amax().float()
        scale = torch.where(amax == 0, 1.0, amax / FP8_MAX).reshape(1)
        rounded = (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        rounded, scale = quantise_rows(weight, DTYPES[str(kind)])
    return params, {"values": rounded, "scale": scale}


def unpack(packed: Packed) -> Tensor:
    """Give the weight [N, K] back, dequantised."""
    kind = _kind(packed.params)
    weight = packed.tensors["values"]
    if kind is None:
        return weight
    if kind == "int4":
        return int4.unpack(packed.tensors, packed.shape).to(packed.dtype)
    return (weight.float() * packed.tensors["scale"][:, None]).to(packed.dtype)


def check_content(packed: Packed) -> None:
    """Raise unless every value and scale is finite."""
    for name, tensor in packed.tensors.items():
        if (tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn) and not tensor.float().isfinite().all():
            raise FormatError(f"tensor {name} holds a value that is not finite")


UNPACKING_INT4 = 3.5
"""Operations a weight and token, as the times of torch's int4 product are on an H200 from 64 tokens on."""


def cost(problem: Problem, weight_bytes: float) -> tuple[Pass, ...]:
    """Give the passes of a product; 8-bit kinds round the activations first."""
    kind = _kind(problem.params)
    m, n, k = problem.m, problem.n, problem.k
    if kind is None or kind == "int4":
        return fused_cost(problem, weight_bytes, 0 if kind is None else UNPACKING_INT4 * m * n * k)
    width = problem.dtype.itemsize
    rounding = Pass(m * k * (width + 1), 0, "fp32")
    return (rounding, Pass(weight_bytes + m * k + m * n * width, 2 * m * n * k, UNITS[kind]))


def _kind(params: Params) -> str | None:
    kind = params.get("kind")
    if kind is None:
        return None
    if kind not in QUANTISED:
        raise FormatError(f"format dense has no kind {kind!r}; it has {', '.join(QUANTISED)}")
    return str(kind)

"""Dense weights on disk and on a GPU: unquantised, or 8-bit or 4-bit values with scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Codes, Packed, Params, TensorSpec, WeightSpec, choice_of, require_codes
from semisparse.formats.dense.storage import int4
from semisparse.patterns import Pattern, VectorNM
from semisparse.quant.symmetric import FP8_MAX, quantise_rows

KINDS = ("int8", "fp8", "fp8_tensor", "int4")
"""Symmetric with a scale per row (int8, fp8) or per tensor (fp8_tensor); scale and zero per 32 columns (int4)."""

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_tensor": torch.float8_e4m3fn}
"""The dtype of ``values`` in the 8-bit kinds."""


def kind_of(params: Params) -> str | None:
    """Return the kind that ``params`` name; None for an unquantised weight.

    Raises:
        FormatError: there is no such kind.
    """
    return choice_of("dense", params, "kind", KINDS) if "kind" in params else None


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    kind = kind_of(spec.params)
    if kind is None:
        return (TensorSpec("values", None, ("N", "K"), split_n=0, split_k=1),)
    if kind == "int4":
        return int4.SPECS
    scale = TensorSpec("scale", torch.float32, ("scales",), split_n=None if kind == "fp8_tensor" else 0)
    return (TensorSpec("values", DTYPES[kind], ("N", "K"), split_n=0, split_k=1), scale)


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the numbers of scales and of int4 tiles.

    Raises:
        FormatError: there is no such kind, or a param that the format does not have.
    """
    unknown = set(spec.params) - {"kind"}
    if unknown:
        raise FormatError(f"format dense has no param {min(unknown)!r}; it has kind, or none")
    n, k = spec.shape
    return {"scales": 1 if kind_of(spec.params) == "fp8_tensor" else n, **int4.counts(n, k)}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns at whose multiples a slice obeys the pattern or, for int4, holds whole tiles."""
    if kind_of(spec.params) == "int4":
        return int4.ROWS, int4.COLUMNS
    return (spec.pattern.length if isinstance(spec.pattern, VectorNM) else 1), spec.pattern.step


def scale_columns(spec: WeightSpec) -> int:
    """Return the columns that share a scale: all of a row, or int4's group; 1 for an unquantised weight.

    1 for a scale of the whole tensor, too: the part that holds its largest value keeps it.
    """
    return {"int8": spec.shape[1], "fp8": spec.shape[1], "int4": int4.GROUP}.get(str(kind_of(spec.params)), 1)


def pack(
    weight: Tensor, pattern: Pattern, kind: str | None = None, codes: Codes | None = None
) -> tuple[Params, dict[str, Tensor]]:
    """Store a weight.

    Args:
        weight: [N, K].
        pattern: any; zeros are stored like other values.
        kind: None for an unquantised weight, or one of `KINDS`.
        codes: for kinds int8 and fp8, the codes of a weight that is quantised already.
    Raises:
        FormatError: ``kind`` is unknown or takes no codes, the codes are not for this weight, or int4 cannot tile
            this shape.
    """
    params = Params() if kind is None else Params(kind=kind)
    kind = kind_of(params)
    if codes is not None:
        if kind not in ("int8", "fp8"):
            raise FormatError(f"format dense takes codes for kinds int8 and fp8, not for {kind or 'no kind'}")
        require_codes(codes, weight, DTYPES[kind], 8, weight.shape[1])
        return params, {"values": codes.values, "scale": codes.scale[:, 0].float()}
    if kind is None:
        return params, {"values": weight.contiguous() + 0.0}  # -0.0 becomes +0.0, as in every format
    if kind == "int4":
        return params, int4.pack(weight)
    if kind == "fp8_tensor":
        amax = weight.abs().amax().float()
        scale = torch.where(amax == 0, 1.0, amax / FP8_MAX).reshape(1)
        rounded = (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        rounded, scale = quantise_rows(weight, DTYPES[kind])
    return params, {"values": rounded, "scale": scale}


def unpack(packed: Packed) -> Tensor:
    """Return the dense weight, [N, K] in its dtype, dequantised."""
    kind = kind_of(packed.params)
    weight = packed.tensors["values"]
    if kind is None:
        return weight
    if kind == "int4":
        return int4.unpack(packed.tensors, packed.shape).to(packed.dtype)
    return (weight.float() * packed.tensors["scale"][:, None]).to(packed.dtype)


def codes_of(packed: Packed) -> Codes | None:
    """Return the 8-bit values and their scales; None without a kind, and for int4: its zero is a weight, not a code."""
    kind = kind_of(packed.params)
    if kind is None or kind == "int4":
        return None
    scale = packed.tensors["scale"].expand(packed.shape[0])[:, None]
    return Codes(8, packed.tensors["values"], scale, None, packed.shape[1], rounds_x=True)

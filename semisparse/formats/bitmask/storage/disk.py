"""The layout on disk, ``rows``: a 64-bit mask per row and 64 columns, and the values or codes in column order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec
from semisparse.formats.bitmask.storage.codes import (
    code_bits,
    entries_of,
    middle_code,
    pack_codes,
    scales_for,
    unpack_codes,
    with_scale,
)
from semisparse.patterns import NM, Pattern, VectorNM
from semisparse.patterns.base import blocks_along
from semisparse.quant.group import GroupScales
from semisparse.runtime.bits import bits_of

BLOCK = 64
"""Columns per mask."""

EXACT = (
    TensorSpec("masks", torch.int64, ("N", "blocks"), split_n=0, split_k=1),
    TensorSpec("values", None, ("N", "slots"), split_n=0, split_k=1),
)
VARIABLE = (
    TensorSpec("masks", torch.int64, ("N", "blocks")),
    TensorSpec("values", None, ("kept",)),
    TensorSpec("row_starts", torch.int64, ("N+1",)),
)
EXACT_CODES = (
    TensorSpec("masks", torch.int64, ("N", "blocks"), split_n=0, split_k=1),
    TensorSpec("codes", torch.uint8, ("N", "slots"), split_n=0, split_k=1),
    TensorSpec("scale", None, ("N", "blocks"), split_n=0, split_k=1),
)
VARIABLE_CODES = (
    TensorSpec("masks", torch.int64, ("N", "blocks")),
    TensorSpec("codes", torch.uint8, ("kept",)),
    TensorSpec("scale", None, ("N", "blocks")),
    TensorSpec("row_starts", torch.int64, ("N+1",)),
)


def values_per_block(pattern: Pattern) -> int | None:
    """Return how many values each 64 columns store, or None if ``pattern`` does not bound that number."""
    if isinstance(pattern, NM | VectorNM) and BLOCK % pattern.window == 0:
        return pattern.keep * (BLOCK // pattern.window)
    return None


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors."""
    exact, variable = (EXACT_CODES, VARIABLE_CODES) if code_bits(spec.params) else (EXACT, VARIABLE)
    return variable if values_per_block(spec.pattern) is None else exact


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    blocks = -(-spec.shape[1] // BLOCK)
    count = values_per_block(spec.pattern)
    if count is None:
        return {"blocks": blocks, "kept": int(spec.params["kept"])}
    return {"blocks": blocks, "slots": blocks * entries_of(count, code_bits(spec.params))}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns at whose multiples the exact layout may be cut."""
    return 1, BLOCK


def scale_columns(spec: WeightSpec) -> int:
    """Return the columns that share a scale: a block's; 1 for values stored as they are."""
    return BLOCK if code_bits(spec.params) else 1


def pack(
    weight: Tensor, pattern: Pattern, kind: str = "none", scales: GroupScales | None = None
) -> tuple[dict[str, int | str], dict[str, Tensor]]:
    """Store a weight's non-zeros and one bit per column; -0.0, and weights whose code is that of zero, count as zero.

    Args:
        weight: [N, K], obeying ``pattern``.
        pattern: decides between the exact and the variable layout.
        kind: ``none`` stores values as they are; ``w8`` and ``w4`` quantise them to codes.
        scales: of the codes; by default such that they span each block.
    Returns:
        params: ``kind`` if there are codes; in the variable layout ``kept``, the number of values or bytes of codes.
        tensors: by name.
    Raises:
        FormatError: the kind is unknown, or the scales are not for this weight and kind.
    """
    bits = code_bits(Params(kind=kind))
    if scales is not None and not bits:
        raise FormatError("format bitmask takes scales with kind=w8 or kind=w4, got kind=none")
    if bits:
        scales = scales_for(weight, bits, scales)
        entries, zero = scales.codes(weight), middle_code(bits)
    else:
        # The zeros that fill a block may be -0.0; adding +0.0 makes them +0.0 and changes nothing else.
        entries, zero = blocks_along(weight, BLOCK, dim=1) + 0.0, 0
    stored, count = entries != zero, values_per_block(pattern)
    if count is not None:
        stored |= lowest_dead(stored, count)
    params: dict[str, int | str] = {"kind": kind} if bits else {}
    tensors = {"masks": masks_of(stored)}
    if scales is not None:
        tensors |= {"codes": pack_codes(entries, stored, bits), "scale": scales.scale.to(weight.dtype)}
    else:
        tensors["values"] = entries.masked_select(stored)
    name = "codes" if bits else "values"
    if count is not None:
        return params, tensors | {name: tensors[name].view(weight.shape[0], -1)}
    row_starts = torch.zeros(weight.shape[0] + 1, dtype=torch.int64, device=weight.device)
    torch.cumsum(entries_of(stored.sum(-1), bits).sum(1), 0, out=row_starts[1:])
    return params | {"kept": len(tensors[name])}, tensors | {"row_starts": row_starts}


def unpack(packed: Packed) -> Tensor:
    """Return the dense weight, [N, K] in its dtype."""
    n, k = packed.shape
    stored = bits_of(packed.tensors["masks"])
    bits = code_bits(packed.params)
    if bits:
        codes = unpack_codes(packed.tensors["codes"].flatten(), stored, bits)
        # Zeros are -0.0 where the scale is negative; adding +0.0 makes them +0.0.
        blocks = with_scale(packed.tensors["scale"], bits).values(codes) + 0.0
    else:
        blocks = torch.zeros(stored.shape, dtype=packed.dtype, device=stored.device)
        blocks.masked_scatter_(stored, packed.tensors["values"])
    return blocks.flatten(1)[:n, :k].contiguous()


def lowest_dead(stored: Tensor, count: int) -> Tensor:
    """Mark the lowest columns of each block that are not stored, as many as it lacks to store ``count`` values."""
    missing = count - stored.sum(-1, keepdim=True, dtype=torch.int8)
    dead = ~stored
    return dead & (dead.cumsum(-1, dtype=torch.int8) <= missing)


def masks_of(stored: Tensor) -> Tensor:
    """Pack bits, [N, blocks, 64] bool, into int64 masks [N, blocks]; bit i is column i of its block."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=stored.device)
    octets = (stored.unflatten(-1, (8, 8)) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64).squeeze(-1)

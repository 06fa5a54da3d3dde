"""The layout on disk: masks of kept groups, their codes, scales and zero points (README.md, "Layout")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Codes, Packed, Params, TensorSpec, WeightSpec, choice_of, require_codes
from semisparse.formats.gqs.storage.masks import (
    CHUNK_GROUPS,
    CHUNK_ROWS,
    in_mask_order,
    masks_of,
    starts_of,
    unchunked,
)
from semisparse.patterns import Group, Pattern
from semisparse.quant.group import KINDS, GroupScales, scales_of, split_groups, stored_groups
from semisparse.runtime.bits import bits_of

SIZES = (4, 8, 16, 32, 64, 128)
"""Columns per group."""

MAX_KEPT = 2**31 - 1
"""Maximum groups that ``starts`` can count."""

SPECS = (
    TensorSpec("masks", torch.int64, ("row_tiles", "column_tiles")),
    TensorSpec("starts", torch.int32, ("chunks+1",)),
    TensorSpec("codes", torch.uint8, ("kept", "code_bytes")),
    TensorSpec("scale", None, ("kept",)),
    TensorSpec("zero", torch.uint8, ("kept",)),
)

TENSORS = tuple(spec.name for spec in SPECS)


def accepts(pattern: Pattern) -> str | None:
    """Return why a pattern cannot be stored, or None if it can."""
    if isinstance(pattern, Group) and pattern.size in SIZES:
        return None
    return f"it stores groups along K, such as g16@50% or g16@0%, of {', '.join(map(str, SIZES))}"


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors, the same for every weight."""
    return SPECS


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the chunks along N, along K and in all, the kept groups, and the bytes of a group's codes.

    Raises:
        FormatError: the kind is unknown, or a group's codes do not fill bytes.
        ValueError: the param ``rows`` is not N.
    """
    (n, k), size, params = spec.shape, group_size(spec.pattern), spec.params
    if params["rows"] != n:  # no tensor's shape tells N, because chunks are padded to 16 rows
        raise ValueError(f"rows = {params['rows']}, N = {n}")
    rows, columns = -(-n // CHUNK_ROWS), -(-k // (CHUNK_GROUPS * size))
    return {
        "row_tiles": rows,
        "column_tiles": columns,
        "chunks": rows * columns,
        "kept": int(params["kept"]),
        "code_bytes": size * code_bits(params, size) // 8,
    }


def facts(spec: WeightSpec) -> Mapping[str, int]:
    """Return ``full``: 1 if no group is dropped. A group that is all zero is dropped, too, whatever the pattern."""
    if "kept" not in spec.params:  # it is a structure already
        return {}
    (n, k), size = spec.shape, group_size(spec.pattern)
    return {"full": int(spec.params["kept"] == n * -(-k // size))}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns of a chunk."""
    return CHUNK_ROWS, CHUNK_GROUPS * group_size(spec.pattern)


def scale_columns(spec: WeightSpec) -> int:
    """Return the columns that share a scale: those of a group."""
    return group_size(spec.pattern)


def group_size(pattern: Pattern) -> int:
    """Return the columns of a group.

    Raises:
        FormatError: the pattern has no groups.
    """
    if not isinstance(pattern, Group):
        raise FormatError(f"format gqs stores patterns such as g16@50%, got {pattern}")
    return pattern.size


def code_bits(params: Params, size: int) -> int:
    """Return the bits of a code.

    Raises:
        FormatError: the kind is unknown, or a group's codes do not fill bytes.
    """
    kind = choice_of("gqs", params, "kind", tuple(KINDS))
    bits = KINDS[kind]
    if size * bits % 8:
        raise FormatError(f"{size} codes of {bits} bits do not fill bytes; take groups of 8 or more for {kind}")
    return bits


def quantises_x(params: Params) -> bool:
    """Return whether kernels quantise x to 8 bits (kind ``w4a8``; GQSA, appendix C)."""
    return str(params["kind"]).endswith("a8")


def pack(
    weight: Tensor,
    pattern: Pattern,
    kind: str = "w4",
    scales: GroupScales | None = None,
    codes: Codes | None = None,
) -> tuple[Mapping[str, int | str], dict[str, Tensor]]:
    """Quantise the groups that are not all zero, and store them.

    Args:
        weight: [N, K] that obeys ``pattern``.
        kind: one of `KINDS`.
        scales: scale and zero point of each group; by default those of `scales_of`. Ignored if ``codes`` are given.
        codes: the codes, scales and zero points that ``weight`` was dequantised from, to store them as they are.
    Raises:
        FormatError: the kind is unknown, the scales or codes do not fit the weight, or too many groups are kept.
    """
    size = group_size(pattern)
    bits = code_bits(Params(kind=kind), size)
    if codes is not None:
        scales = _scales_of_codes(codes, weight, bits, size)
    if scales is None:
        scales = scales_of(weight, bits, size, weight.dtype)
    _check_scales(scales, weight, bits, size)
    scales = scales if codes is not None else scales.within_range()
    masks = masks_of(stored_groups(weight, size))
    mask_bits = bits_of(masks)
    rounded = scales.codes(weight) if codes is None else split_groups(codes.values, size)
    kept = int(mask_bits.sum())
    if kept > MAX_KEPT:
        raise FormatError(f"format gqs counts groups in 32 bits, this weight keeps {kept}")
    tensors = {
        "masks": masks,
        "starts": starts_of(mask_bits),
        "codes": pack_codes(in_mask_order(rounded, mask_bits), bits),
        "scale": in_mask_order(scales.scale.to(weight.dtype), mask_bits),
        "zero": in_mask_order(scales.zero.to(torch.uint8), mask_bits),
    }
    return {"kind": kind, "rows": weight.shape[0], "kept": kept}, tensors


def _scales_of_codes(codes: Codes, weight: Tensor, bits: int, size: int) -> GroupScales:
    """Return the scales of codes, with zero points as they are stored: integers from 0 to 255.

    Raises:
        FormatError: the codes do not fit the weight, or a zero point is not a multiple of 2^(bits - 8).
    """
    require_codes(codes, weight, torch.uint8, bits, size)
    stored = torch.zeros_like(codes.scale) if codes.zero is None else codes.zero * 2.0 ** (8 - bits)
    if codes.zero is None or not torch.equal(stored, stored.round().clamp(0, 255)):
        raise FormatError(
            f"format gqs stores zero points that are multiples of {2.0 ** (bits - 8)} from 0 to "
            f"{255 * 2.0 ** (bits - 8)}, got {'none' if codes.zero is None else 'others'}"
        )
    return GroupScales(bits, size, codes.scale, stored)


def _check_scales(scales: GroupScales, weight: Tensor, bits: int, size: int) -> None:
    shape = (weight.shape[0], -(-weight.shape[1] // size))
    given = (scales.bits, scales.size, tuple(scales.scale.shape), tuple(scales.zero.shape))
    if given != (bits, size, shape, shape):
        raise FormatError(f"scales are (bits, size, shapes) {given}, expected {(bits, size, shape, shape)}")
    valid = scales.scale.isfinite() & (scales.scale > 0)
    if not valid.all():
        row, group = (~valid).nonzero()[0].tolist()
        raise FormatError(f"the scale of row {row}, group {group} is {scales.scale[row, group].item()}")


def unpack(packed: Packed) -> Tensor:
    """Dequantise the weight: [N, K] in its dtype, dropped groups exactly zero."""
    (n, k), size, tensors = packed.shape, group_size(packed.pattern), packed.tensors
    bits = code_bits(packed.params, size)
    scales = GroupScales(bits, size, tensors["scale"], tensors["zero"])
    values = scales.values(unpack_codes(tensors["codes"], bits, size)) + 0.0  # -0.0 becomes +0.0
    return _spread(values, tensors["masks"], 0)[:n].flatten(1)[:, :k].contiguous()


def codes_of(packed: Packed) -> Codes:
    """Return the codes of all groups. A dropped group gets scale 1, and half of the range as codes and zero point."""
    (n, k), size, tensors = packed.shape, group_size(packed.pattern), packed.tensors
    bits, groups = code_bits(packed.params, size), -(-k // size)
    values = _spread(unpack_codes(tensors["codes"], bits, size), tensors["masks"], 2 ** (bits - 1))
    scale, zero = (
        _spread(tensors[name][:, None], tensors["masks"], fill)[:n, :groups, 0]
        for name, fill in (("scale", 1), ("zero", 128))
    )
    values, zero = values[:n].flatten(1)[:, :k].contiguous(), zero.float() * 2.0 ** (bits - 8)
    return Codes(bits, values, scale, zero, size, quantises_x(packed.params))


def _spread(kept: Tensor, masks: Tensor, fill: int) -> Tensor:
    """Scatter values of the kept groups, [kept, n], to [padded rows, padded groups, n], with ``fill`` elsewhere."""
    bits = bits_of(masks)
    chunks = kept.new_full((*bits.shape, kept.shape[1]), fill)
    chunks.masked_scatter_(bits[..., None], kept)  # indexing by a mask waits for the GPU: no graph could capture it
    return unchunked(chunks)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [kept, size] into bytes: in each 8 columns (4 if size is 4) the even columns first, then the odd."""
    unit = min(8, codes.shape[1])
    pairs = codes.unflatten(1, (-1, unit // 2, 2)).transpose(-1, -2).flatten(-2).to(torch.int64)
    words = (pairs << bits * torch.arange(unit, device=codes.device)).sum(-1)
    shifts = 8 * torch.arange(unit * bits // 8, device=codes.device)
    return (words[..., None] >> shifts & 255).to(torch.uint8).flatten(1)


def unpack_codes(octets: Tensor, bits: int, size: int) -> Tensor:
    """Undo `pack_codes`: [kept, size] uint8."""
    unit = min(8, size)
    if 8 % bits == 0:  # no code spans two bytes
        codes = octets[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device) & 2**bits - 1
        codes = codes.flatten(1).unflatten(1, (-1, unit))
    else:
        width = unit * bits // 8
        shifts = 8 * torch.arange(width, device=octets.device)
        words = (octets.unflatten(1, (-1, width)).to(torch.int64) << shifts).sum(-1)
        codes = words[..., None] >> bits * torch.arange(unit, device=octets.device) & 2**bits - 1
    return codes.to(torch.uint8).unflatten(-1, (2, unit // 2)).transpose(-1, -2).flatten(1)

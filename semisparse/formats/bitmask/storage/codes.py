"""Kinds ``w8`` and ``w4``: kept weights as codes of 8 or 4 bits, with one scale per 64 columns of a row.

Quantisation is symmetric (semisparse/quant/group.py), so zero is the middle code, and a stored zero stays exact.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Params, choice_of
from semisparse.quant.group import KINDS, MIDDLE, SYMMETRIC_COLUMNS, GroupScales, scales_of

CODED = ("w8", "w4")
"""The kinds that store codes."""


def code_bits(params: Params) -> int:
    """Return the bits per code; 0 where values are stored as they are (kind ``none``).

    Raises:
        FormatError: the kind is unknown.
    """
    return KINDS.get(choice_of("bitmask", params, "kind", ("none", *CODED), default="none"), 0)


Count = TypeVar("Count", int, Tensor)


def entries_of(count: Count, bits: int) -> Count:
    """Return how many values (if ``bits`` is 0) or bytes of codes ``count`` stored weights of a block take."""
    return (count + 1) // 2 if bits == 4 else count


def middle_code(bits: int) -> int:
    """Return the code of zero."""
    return 1 << bits - 1


def scales_for(weight: Tensor, bits: int, scales: GroupScales | None) -> GroupScales:
    """Return the scales of a weight [N, K]: those given, or by default such that the codes span each block.

    Raises:
        FormatError: the given scales do not fit the weight's shape, are not symmetric, or one is `unusable`.
    """
    if scales is None:
        return scales_of(weight, bits, SYMMETRIC_COLUMNS, weight.dtype, symmetric=True)
    shape = (weight.shape[0], -(-weight.shape[1] // SYMMETRIC_COLUMNS))
    given = (scales.bits, scales.size, scales.symmetric, tuple(scales.scale.shape))
    if given != (bits, SYMMETRIC_COLUMNS, True, shape) or not bool((scales.zero == MIDDLE).all()):
        expected = (bits, SYMMETRIC_COLUMNS, True, shape)
        raise FormatError(
            f"scales are (bits, size, symmetric, shape) {given}, expected {expected}, zero points {MIDDLE}"
        )
    bad = unusable(scales.scale.to(weight.dtype), bits).nonzero()
    if len(bad):
        row, block = bad[0].tolist()
        raise FormatError(
            f"the scale of row {row}, block {block} is {scales.scale[row, block].item()}, "
            "expected a number other than 0 that keeps every code's weight finite"
        )
    return scales


def with_scale(scale: Tensor, bits: int) -> GroupScales:
    """Return symmetric `GroupScales` with a scale per row and block, [N, blocks]."""
    zero = torch.full_like(scale, MIDDLE, dtype=torch.float32)
    return GroupScales(bits, SYMMETRIC_COLUMNS, scale, zero, symmetric=True)


def unusable(scale: Tensor, bits: int) -> Tensor:
    """Return which scales are 0 or NaN, or so large that a code's weight is not finite: bool, in the scale's shape."""
    largest = torch.finfo(scale.dtype).max / middle_code(bits)
    size = scale.abs()
    return ~((size > 0) & (size <= largest))


def pack_codes(codes: Tensor, stored: Tensor, bits: int) -> Tensor:
    """Join the codes of the stored weights, in column order; each block begins at a byte.

    Args:
        codes: [N, blocks, 64] uint8.
        stored: [N, blocks, 64] bool.
        bits: per code, 8 or 4.
    Returns:
        [bytes] uint8. With 4 bits the first of two codes is in the low nibble. If a block has an odd number of codes,
        the high nibble of its last byte is 0.
    """
    if bits == 8:
        return codes.masked_select(stored)
    pairs = F.pad(codes, (0, 1)).masked_select(_with_padding(stored)).unflatten(0, (-1, 2))
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack_codes(octets: Tensor, stored: Tensor, bits: int) -> Tensor:
    """Undo `pack_codes`: [N, blocks, 64] uint8, the middle code where nothing is stored."""
    if bits == 4:
        octets, stored = torch.stack((octets & 15, octets >> 4), -1), _with_padding(stored)
    codes = torch.full(stored.shape, middle_code(bits), dtype=torch.uint8, device=octets.device)
    # masked_scatter_, because indexing by a mask synchronises with the GPU, which a CUDA graph cannot capture
    return codes.masked_scatter_(stored, octets)[..., :SYMMETRIC_COLUMNS]


def _with_padding(stored: Tensor) -> Tensor:
    """Append a 65th column to ``stored``: True for blocks that store an odd number of weights."""
    return torch.cat((stored, stored.sum(-1, keepdim=True) % 2 == 1), -1)

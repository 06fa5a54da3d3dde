"""Weights to compressed 2:4 windows, and back. Values are moved as bits: integers of their own width.

A group stores all of its columns but two: the two lowest that hold zero. Slot s stands for column ``s + shift``, where
``shift`` counts the columns left out below, 0 to 2, and so never decreases. Slots 2j and 2j + 1 are window j's and lie
in its columns 2j to 2j + 3, and each non-zero stands in the earliest window that has room: what the paper's greedy
algorithm 2 finds, without its loop.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec
from semisparse.formats.slide24.layout import aligned_groups, lifted_columns, padded_groups
from semisparse.patterns import NM, Pattern
from semisparse.quant.symmetric import quantise_rows

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Rounded, with a scale a row; without a kind the weight is stored as it is."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

BAND_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Of weight packed at a time: what stays in a CPU's cache packs twice as fast; a GPU wants few launches."""


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors of the kind that ``params`` names."""
    dtype = stored_dtype(params)
    found = (
        TensorSpec("values", dtype, ("N", "slots"), split_n=0, split_k=1),
        TensorSpec("metadata", torch.uint8, ("N", "octets"), split_n=0, split_k=1),
    )
    return found if dtype is None else (*found, TensorSpec("scale", torch.float32, ("N",), split_n=0))


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the stored values and the bytes of metadata of a row."""
    slots = lifted_columns(k, window_of(pattern)) // 2
    return {"slots": slots, "octets": slots // 4}


def grain(pattern: Pattern, params: Params) -> tuple[int, int]:
    """Give the rows and columns that a part of the tensors may start at: whole runs of padded groups."""
    return 1, window_of(pattern) * aligned_groups(window_of(pattern))


def window_of(pattern: Pattern) -> int:
    """Give 2N, the columns of a group; only the patterns that the format accepts come here."""
    if not isinstance(pattern, NM):
        raise FormatError(f"format slide24 stores patterns such as 6:8, got {pattern}")
    return pattern.window


def stored_dtype(params: Params) -> torch.dtype | None:
    """Give the dtype of rounded values, or None for a weight stored as it is."""
    kind = params.get("kind")
    if kind is None:
        return None
    if kind not in KINDS:
        raise FormatError(f"format slide24 has no kind {kind!r}; it has {', '.join(KINDS)}, or none of them")
    return KINDS[str(kind)]


def pack_weight(weight: Tensor, pattern: Pattern, kind: str | None = None) -> tuple[Params, dict[str, Tensor]]:
    """Decompose and compress a weight (section 4.1).

    Args:
        weight: [N, K] that obeys ``pattern``; -0.0 counts as zero.
        kind: None for the weight as it is, or one of `KINDS`.
    Raises:
        FormatError: ``kind`` is unknown.
    """
    params: Params = {} if kind is None else {"kind": kind}
    dtype = stored_dtype(params)
    rows = max(1, BAND_BYTES.get(weight.device.type, BAND_BYTES["cpu"]) // (weight.shape[1] * weight.element_size()))
    bands = [_pack_band(band, window_of(pattern), dtype) for band in weight.split(rows)]
    return params, {name: torch.cat([band[name] for band in bands]) for name in bands[0]}


def _pack_band(weight: Tensor, window: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return compress_stored(weight + 0.0, window)  # -0.0 becomes +0.0
    rounded, scale = quantise_rows(weight, dtype)
    bits = as_bits(rounded)
    # What rounds to -0.0 in fp8 is a zero too; int8 has no such bits.
    return {**compress_stored(bits.masked_fill(bits == -128, 0).view(dtype), window), "scale": scale}


def compress_stored(weight: Tensor, window: int) -> dict[str, Tensor]:
    """Give values and metadata of a weight [N, K] that is stored as it is; it holds no -0.0."""
    values, metadata = _compress(as_bits(weight), window)
    return {"values": values.view(weight.dtype), "metadata": metadata}


def _compress(bits: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Give the stored bits [N, slots] and the metadata [N, slots / 4] of a weight's bits [N, K]."""
    n, k = bits.shape
    groups = padded_groups(k, window)
    # A plane is one column of every group, contiguous, so that every step below is a plain loop over it.
    planes = F.pad(bits, (0, groups * window - k)).view(n, groups, window).permute(2, 0, 1).contiguous()
    one, two = _left_out(planes)
    values = planes[:-2] + ((planes[1:-1] - planes[:-2]) & one) + ((planes[2:] - planes[1:-1]) & two)
    positions = (_odd(window, bits.device)[:, None, None] - one - two).to(torch.uint8)
    return values.permute(1, 2, 0).reshape(n, -1), _join(positions.permute(1, 2, 0).reshape(n, -1))


def _left_out(planes: Tensor) -> tuple[Tensor, Tensor]:
    """Say for each slot, as masks of all bits, whether at least one and whether two columns are left out before it."""
    dead = -(planes == 0).to(planes.dtype)
    one, two = dead.clone(), torch.zeros_like(dead)
    for column in range(1, len(planes)):
        two[column] = two[column - 1] | (one[column - 1] & dead[column])
        one[column] |= one[column - 1]
    return one[:-2], two[1:-1]


def _odd(window: int, device: torch.device) -> Tensor:
    """Tell a window's second slot, whose position is ``shift + 1``, from its first: [slots of a group]."""
    return torch.arange(window - 2, device=device, dtype=torch.uint8) & 1


def _join(positions: Tensor) -> Tensor:
    """Put four positions, [N, slots] uint8, into each byte, the first in the lowest bits."""
    first, second, third, fourth = positions.unflatten(1, (-1, 4)).unbind(-1)
    return first | second << 2 | third << 4 | fourth << 6


def positions_of(metadata: Tensor) -> Tensor:
    """Give each stored value's position in its window: [N, slots] uint8, 0 to 3."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=metadata.device)
    return ((metadata[..., None] >> shifts) & 3).flatten(1)


def shifts_of(metadata: Tensor, window: int) -> Tensor:
    """Give each slot's shift, [N, groups, slots of a group] uint8, of whole groups."""
    positions = positions_of(metadata).unflatten(1, (-1, window - 2))
    return positions - _odd(window, positions.device)


def unpack_stored(packed: Packed) -> Tensor:
    """Give the weight back as it is stored, [N, K] in the values' dtype, without its scales."""
    n, k = packed.shape
    window = window_of(packed.pattern)
    values, shifts = packed.tensors["values"], shifts_of(packed.tensors["metadata"], window)
    bits = as_bits(values).view(shifts.shape)
    blocks = bits.new_zeros(*shifts.shape[:2], window)
    for distance in range(3):
        blocks[..., distance : distance + window - 2] |= bits & -(shifts == distance).to(bits.dtype)
    return blocks.view(n, -1)[:, :k].contiguous().view(values.dtype)


def unpack(packed: Packed) -> Tensor:
    """Give the weight [N, K] back, dequantised where it was rounded."""
    weight = unpack_stored(packed)
    if "scale" not in packed.tensors:
        return weight
    return (weight.float() * packed.tensors["scale"][:, None]).to(packed.dtype)


def unpack_lifted(packed: Packed) -> Tensor:
    """Give the 2:4 weight [N, K'] that hardware multiplies, in the values' dtype, without its scales."""
    values = packed.tensors["values"]
    positions = positions_of(packed.tensors["metadata"]).unflatten(1, (-1, 2)).long()
    bits = as_bits(values).view(positions.shape)
    lifted = bits.new_zeros(*positions.shape[:2], 4)
    return lifted.scatter_(2, positions, bits).flatten(1).view(values.dtype)


def unlift(lifted: Tensor, window: int) -> Tensor:
    """Give back the weight [N, K, filled up to whole groups] of a 2:4 one [N, K'] without -0.0."""
    bits = as_bits(lifted).view(len(lifted), -1, window // 2 - 1, 4)
    blocks = bits.new_zeros(*bits.shape[:2], window)
    for j in range(bits.shape[2]):
        blocks[..., 2 * j : 2 * j + 4] |= bits[..., j, :]
    return blocks.flatten(1).view(lifted.dtype)


def as_bits(values: Tensor) -> Tensor:
    """Give values as the integers of their own width that their bits are."""
    return values.contiguous().view(BITS[values.element_size()])

"""The layout on disk and on a CPU (README.md, "Layout"): values of compressed 2:4 windows, and their 2-bit positions.

Values are moved as integers of their own width. ``window`` is the number of columns per group (8 for 6:8). A group
stores all of its columns but two: the two lowest that hold zero. Slot s of a group holds column ``s + shift``, where
``shift`` counts the columns left out below it, 0 to 2. Shifts never decrease inside a group. So slots 2j and 2j + 1
hold columns of 2:4 window j (2j to 2j + 3), and each non-zero is in the earliest 2:4 window that has room. The paper's
greedy algorithm 2 returns the same, by a loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError, PatternError
from semisparse.formats.base import Codes, Packed, Params, TensorSpec, WeightSpec, require_codes
from semisparse.formats.slide24.storage.decomposition import Decomposition
from semisparse.patterns import NM, Pattern
from semisparse.quant.symmetric import quantise_rows

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""8-bit values with a scale per row; without a kind the weight is not quantised."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer dtype by width in bytes."""

LIFTED_ALIGNMENT = 32
"""K' is padded to a multiple of this: cuSPARSELt requires it in 8 bits, and a row then has whole bytes of metadata."""

ANY_K_WINDOW = 128
"""The widest window that is accepted at any K. A wider one must not exceed K: its group would be mostly padding."""

BAND_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
"""Bytes of weight packed at a time. Rows that fit a CPU's cache are packed twice as fast; on a GPU large bands need
fewer launches."""

ACCEPTED = "it stores keep:window with keep = window - 2 and an even window: 2:4, 4:6, 6:8, 8:10, ..."


def accepts(pattern: Pattern) -> str | None:
    """Return why the format cannot store ``pattern``; None if it can.

    A pattern that does not fill every 2:4 window is refused: it would store more values than it keeps.
    """
    if not isinstance(pattern, NM):
        return ACCEPTED
    try:
        windows = Decomposition(pattern.keep, pattern.window)
    except PatternError:
        return ACCEPTED
    return None if windows.exists and windows.capacity == pattern.keep else ACCEPTED


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors of the kind that ``spec.params`` names."""
    dtype = quantised_dtype(spec.params)
    values = TensorSpec("values", dtype, ("N", "slots"), split_n=0, split_k=1)
    metadata = TensorSpec("metadata", torch.uint8, ("N", "octets"), split_n=0, split_k=1)
    return (values, metadata) if dtype is None else (values, metadata, SCALE)


SCALE = TensorSpec("scale", torch.float32, ("N",), split_n=0)


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions: slots (stored values) and octets (bytes of metadata) per row."""
    slots = lifted_columns(spec.shape[1], window_of(spec.pattern)) // 2
    return {"slots": slots, "octets": slots // 4}


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return (rows, columns), at multiples of which the tensors can be sliced: 1 row, `aligned_groups` groups."""
    return 1, window_of(spec.pattern) * aligned_groups(window_of(spec.pattern))


def scale_columns(spec: WeightSpec) -> int:
    """Return the columns that share a scale: all of a row; 1 for an unquantised weight."""
    return 1 if quantised_dtype(spec.params) is None else spec.shape[1]


def window_of(pattern: Pattern) -> int:
    """Return the columns of a group: the paper's 2N."""
    if not isinstance(pattern, NM):
        raise FormatError(f"format slide24 stores patterns such as 6:8, got {pattern}")
    return pattern.window


def quantised_dtype(params: Params) -> torch.dtype | None:
    """Return the dtype of quantised values, or None for an unquantised weight.

    Raises:
        FormatError: ``params`` name an unknown kind.
    """
    kind = params.get("kind")
    if kind is None:
        return None
    if kind not in KINDS:
        raise FormatError(f"format slide24 has no kind {kind!r}; it has {', '.join(KINDS)}, or leave kind out")
    return KINDS[str(kind)]


def value_dtype(spec: WeightSpec) -> torch.dtype:
    """Return the dtype of the stored values, quantised or not."""
    return quantised_dtype(spec.params) or spec.dtype


def aligned_groups(window: int) -> int:
    """Return the fewest groups whose lifted columns are a multiple of `LIFTED_ALIGNMENT`."""
    return LIFTED_ALIGNMENT // gcd(LIFTED_ALIGNMENT, 2 * (window - 2))


def padded_groups(k: int, window: int) -> int:
    """Return the number of groups per row of K columns, padding included: a multiple of `aligned_groups`.

    Raises:
        FormatError: the window is too wide for K: rows of a small weight would be mostly padding.
    """
    if window > max(ANY_K_WINDOW, k + k % 2):
        raise FormatError(
            f"pattern {window - 2}:{window} is too wide for K = {k}: format slide24 takes windows up to K, "
            f"and up to {ANY_K_WINDOW} for any K"
        )
    aligned = aligned_groups(window)
    return -(-k // (window * aligned)) * aligned


def lifted_columns(k: int, window: int) -> int:
    """Return K', the columns of a lifted row (equation 5, padded); half as many values are stored.

    Raises:
        FormatError: as `padded_groups`.
    """
    return padded_groups(k, window) * 2 * (window - 2)


def pack_weight(
    weight: Tensor, pattern: Pattern, kind: str | None = None, codes: Codes | None = None
) -> tuple[Params, dict[str, Tensor]]:
    """Decompose and compress a weight (section 4.1, algorithm 2).

    Args:
        weight: [N, K] that obeys ``pattern``; -0.0 counts as zero.
        pattern: one that `accepts` does not refuse.
        kind: None for an unquantised weight, or one of `KINDS`.
        codes: with a kind, the codes and scales that ``weight`` was dequantised from, to store them as they are.
    Raises:
        FormatError: ``kind`` is unknown, the pattern's window is too wide for K, or the codes do not fit the weight.
    """
    params = Params() if kind is None else Params(kind=kind)
    dtype = quantised_dtype(params)
    rows = max(1, BAND_BYTES.get(weight.device.type, BAND_BYTES["cpu"]) // (weight.shape[1] * weight.element_size()))
    if codes is None:
        bands = [_pack_band(band, window_of(pattern), dtype) for band in weight.split(rows)]
    elif dtype is None:
        raise FormatError("format slide24 takes codes for kinds int8 and fp8, not for an unquantised weight")
    else:
        require_codes(codes, weight, dtype, 8, weight.shape[1])
        scales = codes.scale[:, 0].float().split(rows)
        pairs = zip(codes.values.split(rows), scales, strict=True)
        bands = [_compress_codes(band, scale, window_of(pattern)) for band, scale in pairs]
    return params, {name: torch.cat([band[name] for band in bands]) for name in bands[0]}


def _pack_band(weight: Tensor, window: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype is None:
        return compress(weight + 0.0, window)  # -0.0 becomes +0.0
    quantised, scale = quantise_rows(weight, dtype)
    return _compress_codes(quantised, scale, window)


def _compress_codes(quantised: Tensor, scale: Tensor, window: int) -> dict[str, Tensor]:
    bits = as_bits(quantised)
    if quantised.dtype != torch.int8:
        bits = bits.masked_fill(bits == -128, 0)  # these bits are -0.0 in fp8
    return {**compress(bits.view(quantised.dtype), window), "scale": scale}


def compress(weight: Tensor, window: int) -> dict[str, Tensor]:
    """Return values [N, slots] and metadata [N, slots / 4] of a weight [N, K] without -0.0, in its own dtype."""
    bits = as_bits(weight)
    n, k = bits.shape
    groups = padded_groups(k, window)
    # A plane is one column of every group, contiguous in memory: every step below is elementwise on planes.
    planes = F.pad(bits, (0, groups * window - k)).view(n, groups, window).permute(2, 0, 1).contiguous()
    one, two = _left_out(planes)
    # Slot s takes column s, s + 1 or s + 2. A mask is 0 or -1: a + ((b - a) & mask) selects, - mask adds 1.
    values = planes[:-2] + ((planes[1:-1] - planes[:-2]) & one) + ((planes[2:] - planes[1:-1]) & two)
    positions = (_slot_parity(window, bits.device)[:, None, None] - one - two).to(torch.uint8)
    first, second, third, fourth = positions.permute(1, 2, 0).reshape(n, -1, 4).unbind(-1)
    return {
        "values": values.permute(1, 2, 0).reshape(n, -1).view(weight.dtype),
        "metadata": first | second << 2 | third << 4 | fourth << 6,
    }


def _left_out(planes: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks per slot: at least one, and two, columns of its group are left out before it.

    Args:
        planes: [window, N, groups], a column of every group each, as integers.
    Returns:
        Each [window - 2, N, groups], -1 where it holds, else 0.
    """
    zero = -(planes == 0).to(planes.dtype)
    one, two = zero.clone(), torch.zeros_like(zero)
    for column in range(1, len(planes)):
        two[column] = two[column - 1] | (one[column - 1] & zero[column])
        one[column] |= one[column - 1]
    return one[:-2], two[1:-1]


def _slot_parity(window: int, device: torch.device) -> Tensor:
    """Return, per slot of a group, 0 for the first of its 2:4 window and 1 for the second (position ``shift + 1``)."""
    return torch.arange(window - 2, device=device, dtype=torch.uint8) & 1


def positions_of(metadata: Tensor) -> Tensor:
    """Return each stored value's position in its 2:4 window, 0 to 3: [N, slots] uint8."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=metadata.device)
    return ((metadata[..., None] >> shifts) & 3).flatten(1)


def shifts_of(metadata: Tensor, window: int) -> Tensor:
    """Return each slot's shift: [N, groups, window - 2] uint8. ``metadata`` begins and ends with whole groups."""
    positions = positions_of(metadata).unflatten(1, (-1, window - 2))
    return positions - _slot_parity(window, positions.device)


def unpack_values(packed: Packed) -> Tensor:
    """Return the weight [N, K] in the values' dtype, unscaled."""
    n, k = packed.shape
    window = window_of(packed.pattern)
    values, shifts = packed.tensors["values"], shifts_of(packed.tensors["metadata"], window)
    bits = as_bits(values).view(shifts.shape)
    groups = bits.new_zeros(*shifts.shape[:2], window)
    for shift in range(3):
        groups[..., shift : shift + window - 2] |= bits & -(shifts == shift).to(bits.dtype)
    return groups.view(n, -1)[:, :k].contiguous().view(values.dtype)


def scaled(weight: Tensor, packed: Packed) -> Tensor:
    """Return stored values [N, K] dequantised to the weight's dtype; unchanged if the weight is not quantised."""
    if "scale" not in packed.tensors:
        return weight
    return (weight.float() * packed.tensors["scale"][:, None]).to(packed.dtype)


def unpack(packed: Packed) -> Tensor:
    """Return the weight [N, K], dequantised if it is quantised."""
    return scaled(unpack_values(packed), packed)


def codes_of(packed: Packed) -> Codes | None:
    """Return the 8-bit values and their scales; None for an unquantised weight."""
    if "scale" not in packed.tensors:
        return None
    scale = packed.tensors["scale"][:, None]
    return Codes(8, unpack_values(packed), scale, None, packed.shape[1], rounds_x=True)


def unpack_lifted(packed: Packed) -> Tensor:
    """Return the 2:4 weight [N, K'] that hardware multiplies, in the values' dtype, unscaled."""
    values = packed.tensors["values"]
    positions = positions_of(packed.tensors["metadata"]).unflatten(1, (-1, 2)).long()
    bits = as_bits(values).view(positions.shape)
    lifted = bits.new_zeros(*positions.shape[:2], 4)
    return lifted.scatter_(2, positions, bits).flatten(1).view(values.dtype)


def unlift(lifted: Tensor, window: int) -> Tensor:
    """Return the weight [N, K padded to whole groups] of a 2:4 weight [N, K'] without -0.0."""
    bits = as_bits(lifted).view(len(lifted), -1, window // 2 - 1, 4)
    groups = bits.new_zeros(*bits.shape[:2], window)
    for j in range(bits.shape[2]):
        groups[..., 2 * j : 2 * j + 4] |= bits[..., j, :]
    return groups.flatten(1).view(lifted.dtype)


def as_bits(values: Tensor) -> Tensor:
    """View values as integers of their own width."""
    return values.contiguous().view(INTEGERS[values.element_size()])

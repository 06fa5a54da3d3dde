"""Group-sparse weights to masks of groups, codes, scales and zero points, and back. README.md gives the bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec
from semisparse.formats.bits import bit_counts
from semisparse.patterns import Group, Pattern
from semisparse.quant.group import KINDS, GroupScales, scales_of, stored_groups

SIZES = (4, 8, 16, 32, 64, 128)

TILE_ROWS = 16
TILE_GROUPS = 4
"""A chunk is 16 rows by 4 groups: what one warp multiplies with one load of x."""

SPECS = (
    TensorSpec("masks", torch.int64, ("row_tiles", "column_tiles")),
    TensorSpec("starts", torch.int32, ("chunks+1",)),
    TensorSpec("codes", torch.uint8, ("kept", "code_bytes")),
    TensorSpec("scale", None, ("kept",)),
    TensorSpec("zero", torch.uint8, ("kept",)),
)


def accepts(pattern: Pattern) -> str | None:
    """Say why a pattern cannot be stored, or None if it can."""
    if isinstance(pattern, Group) and pattern.size in SIZES:
        return None
    return f"it stores groups along K, such as g16@50% or g16@0%, of {', '.join(map(str, SIZES))}"


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the tiles along N and K, their number, the groups stored and the bytes of one group's codes."""
    size = size_of(pattern)
    if params["rows"] != n:  # no shape tells N, because tiles are filled up to 16 rows
        raise ValueError(f"rows = {params['rows']}, N = {n}")
    rows, columns = -(-n // TILE_ROWS), -(-k // (TILE_GROUPS * size))
    return {
        "row_tiles": rows,
        "column_tiles": columns,
        "chunks": rows * columns,
        "kept": int(params["kept"]),
        "code_bytes": size * bits_of(params, size) // 8,
    }


def size_of(pattern: Pattern) -> int:
    """Give the weights of a group; only the patterns that the format accepts come here."""
    if not isinstance(pattern, Group):
        raise FormatError(f"format gqs stores patterns such as g16@50%, got {pattern}")
    return pattern.size


def bits_of(params: Params, size: int) -> int:
    """Give the bits of a code.

    Raises:
        FormatError: the kind is unknown, or a group's codes do not fill bytes.
    """
    kind = params.get("kind")
    if kind not in KINDS:
        raise FormatError(f"format gqs has no kind {kind!r}; it has {', '.join(KINDS)}")
    bits = KINDS[str(kind)]
    if size * bits % 8:
        raise FormatError(f"{size} codes of {bits} bits do not fill bytes; take groups of 8 or more for {kind}")
    return bits


def pack_weight(
    weight: Tensor, pattern: Pattern, kind: str = "w4", scales: GroupScales | None = None
) -> tuple[Params, dict[str, Tensor]]:
    """Round the groups that are not all zero, and store them.

    Args:
        weight: [N, K] that obeys ``pattern``.
        kind: one of `KINDS`.
        scales: how each group is rounded; by default so that its codes span it.
    Raises:
        FormatError: the kind is unknown, or the scales are not for this weight.
    """
    size = size_of(pattern)
    bits = bits_of({"kind": kind}, size)
    if scales is None:
        scales = scales_of(weight, bits, size, weight.dtype)
    _check_scales(scales, weight, bits, size)
    masks = masks_of(stored_groups(weight, size))
    bits_set = bits_in(masks)
    kept = int(bits_set.sum())
    if kept >= 2**31:
        raise FormatError(f"format gqs counts groups in 32 bits, this weight keeps {kept}")
    starts = F.pad(bits_set.sum(-1).flatten().cumsum(0), (1, 0)).to(torch.int32)
    tensors = {
        "masks": masks,
        "starts": starts,
        "codes": _join(in_order(scales.codes(weight), bits_set), bits),
        "scale": in_order(scales.scale.to(weight.dtype), bits_set),
        "zero": in_order(scales.zero.to(torch.uint8), bits_set),
    }
    return {"kind": kind, "rows": weight.shape[0], "kept": kept}, tensors


def _check_scales(scales: GroupScales, weight: Tensor, bits: int, size: int) -> None:
    shape = (weight.shape[0], -(-weight.shape[1] // size))
    found = (scales.bits, scales.size, tuple(scales.scale.shape), tuple(scales.zero.shape))
    if found != (bits, size, shape, shape):
        raise FormatError(f"scales are (bits, size, shapes) {found}, expected {(bits, size, shape, shape)}")
    if not (scales.scale.isfinite() & (scales.scale > 0)).all():
        row, group = (~(scales.scale.isfinite() & (scales.scale > 0))).nonzero()[0].tolist()
        raise FormatError(f"the scale of row {row}, group {group} is {scales.scale[row, group].item()}")


def unpack(packed: Packed) -> Tensor:
    """Give the weight [N, K] back, dequantised in its dtype, dropped groups exactly zero."""
    n, k = packed.shape
    size = size_of(packed.pattern)
    bits = bits_of(packed.params, size)
    tensors = packed.tensors
    codes = _part(tensors["codes"], bits, size)
    scales = GroupScales(bits, size, tensors["scale"], tensors["zero"])
    values = scales.values(codes) + 0.0  # -0.0 becomes +0.0
    stored = bits_in(tensors["masks"])
    tiles = values.new_zeros(*stored.shape, size)
    tiles.masked_scatter_(stored[..., None], values)  # an assignment by mask waits for the GPU: no graph captures it
    return untiled(tiles).flatten(1)[:n, :k].contiguous()


def check_content(packed: Packed) -> None:
    """Check that no mask has a bit past the weight, that the starts count the bits before each chunk, and the scales.

    Raises:
        FormatError: names the tensor and the place.
    """
    n, k = packed.shape
    masks = packed.tensors["masks"]
    for last, inside, what in (
        (masks[-1], _bits_of_rows((n - 1) % TILE_ROWS + 1), f"row N = {n}"),
        (masks[:, -1], _bits_of_groups((-(-k // size_of(packed.pattern)) - 1) % TILE_GROUPS + 1), f"column K = {k}"),
    ):
        if (last & ~inside).any():
            raise FormatError(f"tensor masks keeps a group past {what}")
    wanted = F.pad(bit_counts(masks).flatten().cumsum(0), (1, 0))
    starts = packed.tensors["starts"]
    if not torch.equal(starts, wanted.to(starts.dtype)):
        place = int((starts != wanted).nonzero()[0])
        raise FormatError(
            f"tensor starts, at chunk {place}: {starts[place]} groups before it, the masks have {wanted[place]}"
        )
    if int(wanted[-1]) != len(packed.tensors["zero"]):
        raise FormatError(f"the masks keep {wanted[-1]} groups, {len(packed.tensors['zero'])} are stored")
    scale = packed.tensors["scale"]
    if not _positive(scale):
        place = int((~((scale > 0) & (scale < torch.inf))).nonzero()[0])
        raise FormatError(f"tensor scale, at group {place}: {scale[place].item()} is not above 0 and finite")


def _positive(numbers: Tensor) -> bool:
    """Say whether every number is above 0 and finite: bits in order, as integers, from the first one to infinity's."""
    if not numbers.numel():
        return True
    whole = {2: torch.int16, 4: torch.int32}[numbers.element_size()]
    least, most = numbers.view(whole).aminmax()  # 5 times as fast on a CPU as comparing numbers of 16 bits
    return bool((least > 0) & (most < numbers.new_tensor(torch.inf).view(whole)))


def _bits_of_rows(count: int) -> int:
    """Give the bits of the first rows of a chunk, as a signed 64-bit number."""
    return _signed(sum(1 << bit for bit in range(64) if bit // 32 * 8 + bit % 32 // 4 < count))


def _bits_of_groups(count: int) -> int:
    """Give the bits of the first groups of each row of a chunk, as a signed 64-bit number."""
    return _signed(sum(1 << bit for bit in range(64) if bit % TILE_GROUPS < count))


def _signed(bits: int) -> int:
    return bits - (bits >> 63 << 64)


# Tiles: bit 32 h + 4 r + g of a chunk's mask is row 8 h + r, group g of it. Groups are stored in the order of the bits.


def _tiled(x: Tensor) -> Tensor:
    """Cut [N, groups, n] into chunks, [row tiles, column tiles, 64, n], filled up with zeros."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % TILE_GROUPS, 0, -x.shape[0] % TILE_ROWS))
    return x.unflatten(1, (-1, TILE_GROUPS)).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).flatten(2, 3)


def untiled(x: Tensor) -> Tensor:
    """Undo `_tiled` for [row tiles, column tiles, 64, n], but for its filling: [rows, groups, n]."""
    return x.unflatten(2, (TILE_ROWS, TILE_GROUPS)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def in_order(x: Tensor, stored: Tensor) -> Tensor:
    """Take the stored groups of [N, groups] or [N, groups, n] in the order of the masks' bits."""
    return _tiled(x)[stored] if x.dim() == 3 else _tiled(x[..., None])[stored].squeeze(-1)


def masks_of(stored: Tensor) -> Tensor:
    """Give the masks, [row tiles, column tiles] int64, of the groups stored, [N, groups] bool."""
    octets = _tiled(stored[..., None]).squeeze(-1).unflatten(-1, (8, 8)).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=stored.device)
    return (octets * weights).sum(-1, dtype=torch.uint8).contiguous().view(torch.int64).squeeze(-1)


def bits_in(masks: Tensor) -> Tensor:
    """Spread masks into bits, [row tiles, column tiles, 64] bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    octets = masks.contiguous().unsqueeze(-1).view(torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Put codes [kept, size] into bytes: of each 8 columns (or 4) the even ones first, then the odd ones."""
    unit = min(8, codes.shape[1])
    pairs = codes.unflatten(1, (-1, unit // 2, 2)).transpose(-1, -2).flatten(-2).to(torch.int64)
    words = (pairs << bits * torch.arange(unit, device=codes.device)).sum(-1)
    places = 8 * torch.arange(unit * bits // 8, device=codes.device)
    return (words[..., None] >> places & 255).to(torch.uint8).flatten(1)


def _part(octets: Tensor, bits: int, size: int) -> Tensor:
    """Undo `_join`: [kept, size] uint8."""
    unit = min(8, size)
    if 8 % bits == 0:  # no code stands in two bytes
        codes = octets[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device) & 2**bits - 1
        codes = codes.flatten(1).unflatten(1, (-1, unit))
    else:
        width = unit * bits // 8
        places = 8 * torch.arange(width, device=octets.device)
        words = (octets.unflatten(1, (-1, width)).to(torch.int64) << places).sum(-1)
        codes = words[..., None] >> bits * torch.arange(unit, device=octets.device) & 2**bits - 1
    return codes.to(torch.uint8).unflatten(-1, (2, unit // 2)).transpose(-1, -2).flatten(1)

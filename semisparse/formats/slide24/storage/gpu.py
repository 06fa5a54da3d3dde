"""The layouts on a GPU (README.md, "Layouts on a GPU"): ``tiles`` for gemm.cu, ``compressed`` for cuSPARSELt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec, choice_of
from semisparse.formats.slide24.cuda import cusparselt_library as cusparselt
from semisparse.formats.slide24.storage import check, disk
from semisparse.runtime.device import device_facts
from semisparse.runtime.kernel import AMPERE, HOPPER, hopper_refusal

LAYOUTS = ("rows", "tiles", "compressed")
"""``rows`` is the layout on disk; the param ``layout`` names another."""

COMPRESSED = TensorSpec("compressed", torch.uint8, ("bytes",))
"""2:4 values and metadata in cuSPARSELt's own order; rows are padded to a multiple of `cusparselt.ROWS`."""

TILES = TensorSpec("tiles", torch.uint8, ("k_tiles", "row_tiles", "bytes"))

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
"""Dtypes of stored values that gemm.cu and cuSPARSELt multiply here."""

ADA = (8, 9)
"""The first compute capability with fp8."""

K_TILE_BYTES = 128
"""Bytes of a lifted token per K tile: a row of shared memory with 128-byte swizzle."""

VALUE_BYTES = K_TILE_BYTES // 2
"""Bytes of a row's values per K tile."""

ROWS = 64
"""Rows per tile: the m64 of wgmma."""

MIN_ROW_TILES = 3
"""Minimum row tiles of a weight, padding included. A CTA of gemm.cu has up to three, and the last CTA along N begins at
an earlier row tile instead of having fewer."""

PADDING = 0x44
"""Metadata of padding: positions 0 and 1, twice."""

METADATA_ORDER = {1: (4, 0, 5, 1, 3, 6, 2, 7), 2: (4, 0, 1, 3, 5, 6, 2, 7)}
"""Axis order of metadata in tiles; the key is the bytes per value. The axes are those of `_metadata_sizes`: 0 row tile,
1 warp, 2 half of the warp's 16 rows, 3 row, 4 K tile, 5 wgmma, 6 16-byte unit of values, 7 byte of metadata."""


def layout_of(params: Params) -> str:
    """Return the layout that ``params`` name; ``rows`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("slide24", params, "layout", LAYOUTS, default="rows")


def specs(spec: WeightSpec) -> tuple[TensorSpec, ...]:
    """Return the stored tensors of the spec's layout."""
    layout = layout_of(spec.params)
    if layout == "rows":
        return disk.specs(spec)
    values = TILES if layout == "tiles" else COMPRESSED
    return (values,) if disk.quantised_dtype(spec.params) is None else (values, disk.SCALE)


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors."""
    layout = layout_of(spec.params)
    if layout == "rows":
        return disk.counts(spec)
    if layout == "compressed":
        return {"bytes": int(spec.params["bytes"])}
    k_tiles, row_tiles = tile_counts(spec)
    return {"k_tiles": k_tiles, "row_tiles": row_tiles, "bytes": tile_bytes(disk.value_dtype(spec).itemsize)}


def tile_counts(spec: WeightSpec) -> tuple[int, int]:
    """Return the number of K tiles, and of tiles of 64 rows, in the layout ``tiles``."""
    (n, k), itemsize = spec.shape, disk.value_dtype(spec).itemsize
    columns = disk.lifted_columns(k, disk.window_of(spec.pattern))
    return -(-columns * itemsize // K_TILE_BYTES), max(MIN_ROW_TILES, -(-n // ROWS))


def tile_bytes(itemsize: int) -> int:
    """Return the bytes of a tile: 64 rows of values, and two bits for each value."""
    return ROWS * VALUE_BYTES + ROWS * VALUE_BYTES // (4 * itemsize)


def unpack(packed: Packed) -> Tensor:
    """Return the weight [N, K], dequantised if it is quantised."""
    return disk.unpack(in_rows(packed))


def check_content(packed: Packed) -> None:
    """Check a weight of any layout: change it to the layout on disk, and check it as `check.check_content` does.

    Padding of ``tiles`` is checked, too. In every layout a position is two bits that select one of four columns, so no
    metadata leads a kernel out of its tensors. The size of ``compressed`` is the param ``bytes``, which is not compared
    with the library's; a checkpoint cannot have this layout.

    Raises:
        FormatError: the content is invalid, or the weight cannot have this layout on its device or in its dtype.
    """
    layout, dtype = layout_of(packed.params), disk.value_dtype(packed.spec)
    if layout != "rows" and dtype not in DTYPES:
        raise FormatError(f"layout {layout} holds 8 or 16 bits per value, not {dtype}")
    if layout == "compressed" and packed.device.type != "cuda":
        raise FormatError(f"layout compressed exists on a GPU only, got it on {packed.device}; .to('cpu') gives rows")
    stored = in_rows(packed)
    check.check_content(stored)
    if layout == "tiles" and not torch.equal(in_tiles(stored).tensors["tiles"], packed.tensors["tiles"]):
        raise FormatError("tensor tiles must hold padding past the last row and column, and holds something else")


def arrange(packed: Packed, device_type: str) -> Packed:
    """Return the same weight in the layout for a device.

    On a CPU that is the layout on disk. On a GPU it is the first of ``tiles`` and ``compressed`` whose kernel takes the
    stored dtype there; K, the dtype of x and whether Triton is there are not considered. If neither does, or the weight
    already has a GPU layout, it is returned unchanged.
    """
    if device_type != "cuda":
        return in_rows(packed)
    dtype = disk.value_dtype(packed.spec)
    if layout_of(packed.params) != "rows":
        return packed
    if tiles_refusal(dtype, packed.device) is None:
        return in_tiles(packed)
    return packed if compressed_refusal(dtype, packed.device) else in_compressed(packed)


def tiles_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why gemm.cu cannot multiply values of ``dtype`` on a GPU; None if it can."""
    return _dtype_refusal(dtype) or hopper_refusal(device)


def compressed_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why cuSPARSELt cannot multiply values of ``dtype`` on a GPU; None if it can."""
    capability, needed = device_facts(device).capability, ADA if dtype == torch.float8_e4m3fn else AMPERE
    if capability < needed:
        return f"{dtype} needs compute capability {needed[0]}.{needed[1]} or later"
    if dtype == torch.float16 and capability == HOPPER:
        return "cuSPARSELt's float16 algorithms hit an illegal instruction on Hopper: use bfloat16, int8 or fp8"
    return _dtype_refusal(dtype) or cusparselt.unavailable(device)


def _dtype_refusal(dtype: torch.dtype) -> str | None:
    if dtype in DTYPES:
        return None
    return f"the 2:4 kernels take int8, fp8, bfloat16 and float16, the weight is {dtype}"


def in_tiles(packed: Packed) -> Packed:
    """Change the layout ``rows`` to ``tiles``."""
    tiles = to_tiles(packed.tensors["values"], packed.tensors["metadata"], tile_counts(packed.spec))
    return packed.in_layout({**packed.params, "layout": "tiles"}, {"tiles": tiles, **_scale_of(packed)})


def in_compressed(packed: Packed) -> Packed:
    """Change the layout ``rows`` to ``compressed``, on the GPU where the weight is."""
    lifted = disk.unpack_lifted(packed)
    padded = F.pad(disk.as_bits(lifted), (0, 0, 0, cusparselt.padded_rows(len(lifted)) - len(lifted)))
    stored = cusparselt.compress(padded.view(lifted.dtype))
    params = {**packed.params, "layout": "compressed", "bytes": stored.numel()}
    return packed.in_layout(params, {"compressed": stored, **_scale_of(packed)})


def in_rows(packed: Packed) -> Packed:
    """Change any layout to the one on disk."""
    layout = layout_of(packed.params)
    if layout == "rows":
        return packed
    (n, k), window, dtype = packed.shape, disk.window_of(packed.pattern), disk.value_dtype(packed.spec)
    columns = disk.lifted_columns(k, window)
    if layout == "tiles":
        tensors = from_tiles(packed.tensors["tiles"], n, columns // 2, dtype)
    else:
        lifted = cusparselt.decompress(packed.tensors["compressed"], cusparselt.padded_rows(n), columns, dtype)
        tensors = disk.compress(disk.unlift(lifted[:n], window)[:, :k], window)
    return packed.in_layout(packed.params.without("layout", "bytes"), {**tensors, **_scale_of(packed)})


def to_tiles(values: Tensor, metadata: Tensor, counts: tuple[int, int]) -> Tensor:
    """Arrange values [N, slots] and metadata [N, slots / 4] (`disk.counts`) as [k_tiles, row_tiles, bytes] uint8.

    Args:
        values: 8 or 16 bits per value.
        metadata: uint8.
        counts: k_tiles, row_tiles.
    """
    width, (k_tiles, row_tiles) = values.element_size(), counts
    octets, rows = VALUE_BYTES // width // 4, row_tiles * ROWS - len(values)
    stored = values.view(torch.uint8)
    stored = F.pad(stored, (0, k_tiles * VALUE_BYTES - stored.shape[1], 0, rows))
    metadata = F.pad(metadata, (0, k_tiles * octets - metadata.shape[1], 0, rows), value=PADDING)
    # Axes: row tile, eighth of its rows, row, K tile, wgmma, 16-byte unit, byte. A core matrix is eight rows of a unit.
    stored = stored.view(row_tiles, 8, 8, k_tiles, 2, 2, 16).permute(3, 0, 4, 5, 1, 2, 6)
    metadata = metadata.view(_metadata_sizes(k_tiles, row_tiles, width)).permute(METADATA_ORDER[width])
    return torch.cat([part.reshape(k_tiles, row_tiles, -1) for part in (stored, metadata)], 2)


def from_tiles(tiles: Tensor, n: int, slots: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return values [N, slots] of ``dtype`` and metadata [N, slots / 4]: the inverse of `to_tiles`."""
    width, (k_tiles, row_tiles, _) = dtype.itemsize, tiles.shape
    stored, metadata = tiles[..., : ROWS * VALUE_BYTES], tiles[..., ROWS * VALUE_BYTES :]
    stored = stored.reshape(k_tiles, row_tiles, 2, 2, 8, 8, 16).permute(1, 4, 5, 0, 2, 3, 6)
    order, sizes = METADATA_ORDER[width], _metadata_sizes(k_tiles, row_tiles, width)
    metadata = metadata.reshape([sizes[axis] for axis in order]).permute([order.index(axis) for axis in range(8)])
    return {
        "values": stored.reshape(row_tiles * ROWS, -1)[:n, : slots * width].contiguous().view(dtype),
        "metadata": metadata.reshape(row_tiles * ROWS, -1)[:n, : slots // 4].contiguous(),
    }


def _metadata_sizes(k_tiles: int, row_tiles: int, width: int) -> tuple[int, ...]:
    """Return the sizes of the axes that `METADATA_ORDER` permutes, for values of ``width`` bytes."""
    return row_tiles, 4, 2, 8, k_tiles, 2, 2, 4 // width


def _scale_of(packed: Packed) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in packed.tensors.items() if name == "scale"}

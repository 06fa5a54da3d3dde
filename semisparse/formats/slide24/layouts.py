"""A slide24 weight's layouts: ``rows``, as it lies on disk; ``tiles``, for Hopper; ``compressed``, for cuSPARSELt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec, in_layout
from semisparse.formats.params import choice_of
from semisparse.formats.slide24 import check, cusparselt, hopper
from semisparse.formats.slide24 import pack as rows
from semisparse.formats.slide24 import tiles as tiling
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.patterns import Pattern

LAYOUTS = ("rows", "tiles", "compressed")

COMPRESSED = TensorSpec("compressed", torch.uint8, ("bytes",))
"""2:4 values and their positions, in the library's order; rows are filled up to a multiple of `cusparselt.ROWS`."""

TILES = TensorSpec("tiles", torch.uint8, ("blocks", "tiles", "bytes"))
"""The same in our own order: `tiles.py` has it."""

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
"""That sparse tensor cores take."""


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name; ``rows`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("slide24", params, "layout", LAYOUTS, default="rows")


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    found = rows.specs(pattern, params)
    first = {"rows": found[:2], "tiles": (TILES,), "compressed": (COMPRESSED,)}[layout_of(params)]
    return (*first, *found[2:])


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    if layout_of(params) == "rows":
        return rows.counts(n, k, pattern, params)
    if layout_of(params) == "compressed":
        return {"bytes": int(params["bytes"])}
    itemsize = 2 if rows.stored_dtype(params) is None else 1
    blocks, count = tiling.tile_counts(n, lifted_columns(k, rows.window_of(pattern)), itemsize)
    return {"blocks": blocks, "tiles": count, "bytes": tiling.tile_bytes(itemsize)}


def unpack(packed: Packed) -> Tensor:
    """Give the weight [N, K] back, dequantised where it was rounded."""
    return rows.unpack(in_rows(packed))


def check_content(packed: Packed) -> None:
    """Check a weight as `check.check_content` does; one in the other layout is brought back first.

    Positions have two bits for four columns in every layout, so that none of them leads a kernel astray.

    Raises:
        FormatError: names the tensor and what is wrong, or where alone it could be checked.
    """
    layout = layout_of(packed.params)
    dtype = rows.stored_dtype(packed.params) or packed.dtype
    if layout != "rows" and dtype not in DTYPES:
        raise FormatError(f"layout {layout} holds 8 or 16 bits a weight, not {dtype}")
    if layout == "compressed" and packed.device.type != "cuda":
        raise FormatError("layout compressed is one of a GPU at work: on disk and on a CPU the layout is rows")
    stored = in_rows(packed)
    check.check_content(stored)
    if layout == "tiles" and not torch.equal(in_tiles(stored).tensors["tiles"], packed.tensors["tiles"]):
        raise FormatError("tensor tiles holds something where nothing belongs: past the last row or column")


def arrange(packed: Packed, device_type: str) -> Packed:
    """Give the same weight in the layout that kernels on a device want: that of the first that can, else rows."""
    if device_type != "cuda":
        return in_rows(packed)
    if layout_of(packed.params) != "rows" or packed.device.type != "cuda":
        return packed
    dtype = rows.stored_dtype(packed.params) or packed.dtype
    if tiles_refusal(dtype, packed.device) is None:
        return in_tiles(packed)
    return packed if compressed_refusal(dtype, packed.device) else compressed(packed)


def tiles_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why Hopper's own kernel cannot multiply weights stored in ``dtype`` on a GPU, or None if it can."""
    return _dtype_refusal(dtype) or hopper.refusal(device)


def compressed_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why cuSPARSELt cannot multiply weights stored in ``dtype`` on a GPU, or None if it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < ((8, 9) if dtype == torch.float8_e4m3fn else (8, 0)):
        return f"{dtype} needs compute capability {'8.9 (Ada)' if dtype == torch.float8_e4m3fn else '8.0'} or later"
    if dtype == torch.float16 and capability[0] == 9:
        return "cuSPARSELt's float16 algorithms die of an illegal instruction on Hopper: use bfloat16, int8 or fp8"
    return _dtype_refusal(dtype) or cusparselt.unavailable(device)


def _dtype_refusal(dtype: torch.dtype) -> str | None:
    return (
        None if dtype in DTYPES else f"sparse tensor cores take int8, fp8, bfloat16 and float16, the weight is {dtype}"
    )


def in_tiles(packed: Packed) -> Packed:
    """Bring a weight from rows into tiles."""
    tiles = tiling.tiles_of(packed.tensors["values"], packed.tensors["metadata"])
    return in_layout(packed, {**packed.params, "layout": "tiles"}, {"tiles": tiles, **_scale_of(packed)})


def compressed(packed: Packed) -> Packed:
    """Bring a weight from rows into cuSPARSELt's layout on the GPU where it is."""
    lifted = rows.unpack_lifted(packed)
    wide = lifted.view(rows.BITS[lifted.element_size()])
    filled = F.pad(wide, (0, 0, 0, -len(lifted) % cusparselt.ROWS)).view(lifted.dtype)
    stored = cusparselt.compress(filled)
    params = {**packed.params, "layout": "compressed", "bytes": stored.numel()}
    return in_layout(packed, params, {"compressed": stored, **_scale_of(packed)})


def in_rows(packed: Packed) -> Packed:
    """Give the same weight in the layout on disk."""
    layout = layout_of(packed.params)
    if layout == "rows":
        return packed
    n, k = packed.shape
    window, dtype = rows.window_of(packed.pattern), rows.stored_dtype(packed.params) or packed.dtype
    columns = lifted_columns(k, window)
    if layout == "tiles":
        values, metadata = tiling.rows_of(packed.tensors["tiles"], n, columns // 2, dtype)
        tensors = {"values": values, "metadata": metadata}
    else:
        lifted = cusparselt.decompress(packed.tensors["compressed"], padded_rows(n), columns, dtype)
        tensors = rows.compress_stored(rows.unlift(lifted[:n], window)[:, :k], window)
    params = {name: value for name, value in packed.params.items() if name not in ("layout", "bytes")}
    return in_layout(packed, params, {**tensors, **_scale_of(packed)})


def padded_rows(n: int) -> int:
    """Count the rows of a compressed weight."""
    return n + -n % cusparselt.ROWS


def _scale_of(packed: Packed) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in packed.tensors.items() if name == "scale"}

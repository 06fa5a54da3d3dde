"""The two layouts of a slide24 weight: ``rows``, as it lies on disk, and ``compressed``, as cuSPARSELt wants it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, TensorSpec
from semisparse.formats.slide24 import cusparselt
from semisparse.formats.slide24 import pack as rows
from semisparse.formats.slide24.layout import lifted_columns
from semisparse.patterns import Pattern

LAYOUTS = ("rows", "compressed")

COMPRESSED = TensorSpec("compressed", torch.uint8, ("bytes",))
"""2:4 values and their positions, in the library's order; rows are filled up to a multiple of `cusparselt.ROWS`."""


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name; ``rows`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    layout = params.get("layout", "rows")
    if layout not in LAYOUTS:
        raise FormatError(f"format slide24 has no layout {layout!r}; it has {', '.join(LAYOUTS)}")
    return str(layout)


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    found = rows.specs(pattern, params)
    return found if layout_of(params) == "rows" else (COMPRESSED, *found[2:])


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    if layout_of(params) == "rows":
        return rows.counts(n, k, pattern, params)
    return {"bytes": int(params["bytes"])}


def unpack(packed: Packed) -> Tensor:
    """Give the weight [N, K] back, dequantised where it was rounded."""
    return rows.unpack(in_rows(packed))


def check_content(packed: Packed) -> None:
    """Check a weight as `pack.check_content` does; one in the other layout is brought back first.

    Positions of that layout have two bits for four columns, so that none of its bytes leads a kernel astray.

    Raises:
        FormatError: names the tensor and what is wrong, or where alone it could be checked.
    """
    if layout_of(packed.params) == "compressed" and packed.device.type != "cuda":
        raise FormatError("layout compressed is one of a GPU at work: on disk and on a CPU the layout is rows")
    rows.check_content(in_rows(packed))


def arrange(packed: Packed, device_type: str) -> Packed:
    """Give the same weight in the layout that kernels on a device want: compressed where cuSPARSELt can, else rows."""
    if device_type != "cuda":
        return in_rows(packed)
    if layout_of(packed.params) == "compressed" or packed.device.type != "cuda" or refusal(packed):
        return packed
    lifted = rows.unpack_lifted(packed)
    compressed = cusparselt.compress(F.pad(_bits(lifted), (0, 0, 0, -len(lifted) % cusparselt.ROWS)).view(lifted.dtype))
    others = {name: tensor for name, tensor in packed.tensors.items() if name == "scale"}
    params = {**packed.params, "layout": "compressed", "bytes": compressed.numel()}
    return _with_layout(packed, params, {"compressed": compressed, **others})


def refusal(packed: Packed) -> str | None:
    """Say why cuSPARSELt cannot multiply this weight on the GPU where it is, or None if it can."""
    return dtype_refusal(rows.stored_dtype(packed.params) or packed.dtype, packed.device)


def dtype_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why cuSPARSELt cannot multiply weights stored in ``dtype`` on a GPU, or None if it can."""
    capability = torch.cuda.get_device_capability(device)
    if dtype not in cusparselt.NAMES or dtype == torch.float32:
        return f"sparse tensor cores take int8, fp8, bfloat16 and float16, the weight is {dtype}"
    if capability < ((8, 9) if dtype == torch.float8_e4m3fn else (8, 0)):
        return f"{dtype} needs compute capability {'8.9 (Ada)' if dtype.itemsize == 1 else '8.0 (Ampere)'} or later"
    if dtype == torch.float16 and capability[0] == 9:
        return "cuSPARSELt's float16 algorithms die of an illegal instruction on Hopper: use bfloat16, int8 or fp8"
    return cusparselt.unavailable(device)


def in_rows(packed: Packed) -> Packed:
    """Give the same weight in the layout on disk."""
    if layout_of(packed.params) == "rows":
        return packed
    n, k = packed.shape
    window = rows.window_of(packed.pattern)
    dtype = rows.stored_dtype(packed.params) or packed.dtype
    padded = padded_rows(n)
    lifted = cusparselt.decompress(packed.tensors["compressed"], padded, lifted_columns(k, window), dtype)
    tensors = rows.compress_stored(rows.unlift(lifted[:n], window)[:, :k], window)
    params = {name: value for name, value in packed.params.items() if name not in ("layout", "bytes")}
    others = {name: tensor for name, tensor in packed.tensors.items() if name == "scale"}
    return _with_layout(packed, params, {**tensors, **others})


def padded_rows(n: int) -> int:
    """Count the rows of a compressed weight."""
    return n + -n % cusparselt.ROWS


def _bits(values: Tensor) -> Tensor:
    return values.view(rows.BITS[values.element_size()])


def _with_layout(packed: Packed, params: Params, tensors: dict[str, Tensor]) -> Packed:
    return Packed(packed.format, packed.version, packed.pattern, packed.shape, packed.dtype, params, tensors)

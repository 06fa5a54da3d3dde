"""The two layouts of a bitmask weight: ``rows``, as it lies on disk, and ``tiles``, as GPU kernels want it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from semisparse.formats.base import Packed, Params, TensorSpec, in_layout
from semisparse.formats.bitmask import pack as rows
from semisparse.formats.bitmask import tiles
from semisparse.formats.params import choice_of
from semisparse.patterns import Pattern

LAYOUTS = ("rows", "tiles")

EXACT = (
    TensorSpec("masks", torch.int64, ("N", "blocks"), split_n=0, split_k=1),
    TensorSpec("values", None, ("N", "slots"), split_n=0, split_k=1),
)
VARIABLE = (
    TensorSpec("masks", torch.int64, ("N", "blocks")),
    TensorSpec("values", None, ("kept",)),
    TensorSpec("row_starts", torch.int64, ("N+1",)),
)


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name; ``rows`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    return choice_of("bitmask", params, "layout", LAYOUTS, default="rows")


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    if layout_of(params) == "tiles":
        return tiles.SPECS
    return VARIABLE if rows.values_per_block(pattern) is None else EXACT


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    blocks = -(-k // rows.BLOCK)
    count = rows.values_per_block(pattern)
    if layout_of(params) == "tiles":
        if count is None:
            raise ValueError(f"pattern {pattern} bounds no block of {rows.BLOCK} columns, so it has no tiles")
        return tiles.counts(n, k, count)
    if count is None:
        return {"blocks": blocks, "kept": int(params["kept"])}
    return {"blocks": blocks, "slots": blocks * count}


def pack_weight(weight: Tensor, pattern: Pattern, layout: str = "rows") -> tuple[Params, dict[str, Tensor]]:
    """Store a weight [N, K] that obeys ``pattern``.

    Raises:
        FormatError: the layout is unknown or cannot hold this weight.
    """
    wanted = layout_of({"layout": layout})
    params, tensors = rows.pack_weight(weight, pattern)
    if wanted == "rows":
        return params, tensors
    shape = (weight.shape[0], weight.shape[1])
    packed = Packed("bitmask", 1, pattern, shape, weight.dtype, params, tensors)
    return {"layout": "tiles"}, tiles.tiles_of(packed)


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    return rows.unpack(_in_rows(packed))


def check_content(packed: Packed) -> None:
    """Check every bit count, start and padding.

    Raises:
        FormatError: names the tensor and what is wrong.
    """
    check = tiles.check_tiles if layout_of(packed.params) == "tiles" else rows.check_content
    check(packed)


def arrange(packed: Packed, device_type: str) -> Packed:
    """Give the same weight in the layout that kernels on a device want: tiles on a GPU where possible, else rows."""
    if device_type != "cuda" or tiles.refusal(packed):
        return _in_rows(packed)
    if layout_of(packed.params) == "tiles":
        return packed
    return in_layout(packed, {"layout": "tiles"}, tiles.tiles_of(packed))


def _in_rows(packed: Packed) -> Packed:
    if layout_of(packed.params) == "rows":
        return packed
    return in_layout(packed, {}, tiles.rows_of(packed))

"""The two layouts of a gqs weight: ``chunks``, for any number of tokens, and ``rows``, for few on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params, Problem, TensorSpec
from semisparse.formats.gqs import pack, rows
from semisparse.patterns import Pattern
from semisparse.quant.group import GroupScales

LAYOUTS = ("chunks", "rows")


def layout_of(params: Params) -> str:
    """Give the layout that ``params`` name; ``chunks`` if they name none.

    Raises:
        FormatError: there is no such layout.
    """
    layout = params.get("layout", "chunks")
    if layout not in LAYOUTS:
        raise FormatError(f"format gqs has no layout {layout!r}; it has {', '.join(LAYOUTS)}")
    return str(layout)


def reads(layout: str, supports: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    """Narrow a kernel's support to a layout."""

    def narrowed(problem: Problem) -> str | None:
        found = layout_of(problem.params)
        return supports(problem) if found == layout else f"reads the layout {layout}, this weight is stored in {found}"

    return narrowed


def specs(pattern: Pattern, params: Params) -> tuple[TensorSpec, ...]:
    """Give the stored tensors."""
    return rows.SPECS if layout_of(params) == "rows" else pack.SPECS


def counts(n: int, k: int, pattern: Pattern, params: Params) -> Mapping[str, int]:
    """Give the named dimensions of the stored tensors."""
    if layout_of(params) == "rows":
        return rows.counts(n, k, pack.size_of(pattern), params)
    return pack.counts(n, k, pattern, params)


def pack_weight(
    weight: Tensor, pattern: Pattern, kind: str = "w4", scales: GroupScales | None = None, layout: str = "chunks"
) -> tuple[Params, dict[str, Tensor]]:
    """Round the groups that are not all zero, and store them in a layout; see `pack.pack_weight`.

    Raises:
        FormatError: the kind or the layout is unknown, or the layout or the scales are not for this weight.
    """
    wanted = layout_of({"layout": layout})
    params, tensors = pack.pack_weight(weight, pattern, kind, scales)
    packed = Packed("gqs", 1, pattern, (weight.shape[0], weight.shape[1]), weight.dtype, params, tensors)
    if wanted == "rows":
        packed = in_rows(packed)
    return packed.params, packed.tensors


def in_rows(packed: Packed) -> Packed:
    """Give a weight in layout ``chunks`` in layout ``rows``."""
    n, k = packed.shape
    steps, tensors = rows.rows_of(packed.tensors, -(-k // pack.size_of(packed.pattern)), n)
    params = {"kind": packed.params["kind"], "kept": packed.params["kept"], "layout": "rows", "steps": steps}
    return Packed(packed.format, packed.version, packed.pattern, packed.shape, packed.dtype, params, tensors)


def in_chunks(packed: Packed) -> Packed:
    """Give a weight in either layout in layout ``chunks``."""
    if layout_of(packed.params) == "chunks":
        return packed
    params = {"kind": packed.params["kind"], "rows": packed.shape[0], "kept": packed.params["kept"]}
    return Packed(
        packed.format, packed.version, packed.pattern, packed.shape, packed.dtype, params, rows.chunks_of(packed)
    )


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] dequantised in its dtype, dropped groups exactly zero."""
    return rows.unpack(packed) if layout_of(packed.params) == "rows" else pack.unpack(packed)


def check_content(packed: Packed) -> None:
    """Check whatever kernels follow, and the scales.

    Raises:
        FormatError: names the tensor and the place.
    """
    (rows if layout_of(packed.params) == "rows" else pack).check_content(packed)

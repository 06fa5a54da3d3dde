"""Parts of a stored weight, and parts together again: groups are moved as they are, and nothing is rounded anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.gqs import pack
from semisparse.formats.gqs.layouts import in_chunks, in_rows, layout_of
from semisparse.patterns import Pattern


def regroup(parts: Sequence[Packed], dim: int, start: int, stop: int, pattern: Pattern) -> Packed:
    """Give rows or columns ``start`` to ``stop`` of weights side by side along ``dim``, declared as ``pattern``.

    Raises:
        FormatError: a group would be cut, or one that is not the last of its row is short.
    """
    layout = layout_of(parts[0].params)
    parts = [in_chunks(part) for part in parts]
    size = pack.size_of(pattern)
    total = sum(part.shape[dim] for part in parts)
    edges = [start, *(part.shape[dim] for part in parts[:-1]), *([stop] if stop < total else [])]
    if dim == 1 and any(edge % size for edge in edges):
        raise FormatError(f"groups of {size} columns cannot be cut or joined at columns {edges}")
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + int(part.params["kept"]))
    places = torch.cat([_places(part, offset) for part, offset in zip(parts, offsets, strict=False)], dim)
    places = places[start:stop] if dim == 0 else places[:, start // size : -(-stop // size)]
    order, where = pack.in_chunks(places)
    kept = {key: torch.cat([p.tensors[key] for p in parts])[order] for key in ("codes", "scale", "zero")}
    other = parts[0].shape[1 - dim]
    shape = (stop - start, other) if dim == 0 else (other, stop - start)
    first = parts[0]
    params = {**first.params, "rows": shape[0], "kept": len(order)}
    whole = Packed(first.format, first.version, pattern, shape, first.dtype, params, {**where, **kept})
    return in_rows(whole) if layout == "rows" else whole


def _places(packed: Packed, offset: int) -> Tensor:
    """Say where each group is stored, counted from ``offset``: [N, groups], -1 where it is dropped."""
    n, k = packed.shape
    places = pack.places_of(packed.tensors["masks"], n, -(-k // pack.size_of(packed.pattern)))
    return torch.where(places >= 0, places + offset, places)

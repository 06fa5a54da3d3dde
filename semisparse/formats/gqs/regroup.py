"""Parts of a stored weight, and parts together again: groups are moved as they are, and nothing is rounded anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed
from semisparse.formats.gqs.pack import bits_in, in_order, masks_of, size_of, untiled
from semisparse.patterns import Pattern


def regroup(parts: Sequence[Packed], dim: int, start: int, stop: int, pattern: Pattern) -> Packed:
    """Give rows or columns ``start`` to ``stop`` of weights side by side along ``dim``, declared as ``pattern``.

    Raises:
        FormatError: a group would be cut, or one that is not the last of its row is short.
    """
    size = size_of(pattern)
    whole = sum(part.shape[dim] for part in parts)
    edges = [start, *(part.shape[dim] for part in parts[:-1]), *([stop] if stop < whole else [])]
    if dim == 1 and any(edge % size for edge in edges):
        raise FormatError(f"groups of {size} columns cannot be cut or joined at columns {edges}")
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + int(part.params["kept"]))
    places = torch.cat([_places(part, offset) for part, offset in zip(parts, offsets, strict=False)], dim)
    places = places[start:stop] if dim == 0 else places[:, start // size : -(-stop // size)]
    masks = masks_of(places >= 0)
    stored = bits_in(masks)
    order = in_order(places, stored)
    tensors = {key: torch.cat([p.tensors[key] for p in parts])[order] for key in ("codes", "scale", "zero")}
    starts = F.pad(stored.sum(-1).flatten().cumsum(0), (1, 0)).to(torch.int32)
    other = parts[0].shape[1 - dim]
    shape = (stop - start, other) if dim == 0 else (other, stop - start)
    first = parts[0]
    params = {**first.params, "rows": shape[0], "kept": len(order)}
    tensors = {"masks": masks, "starts": starts, **tensors}
    return Packed(first.format, first.version, pattern, shape, first.dtype, params, tensors)


def _places(packed: Packed, offset: int) -> Tensor:
    """Say where each group is stored, counted from ``offset``: [N, groups], -1 where it is dropped."""
    stored = bits_in(packed.tensors["masks"])
    places = torch.full_like(stored, -1, dtype=torch.int64)
    places[stored] = torch.arange(offset, offset + int(stored.sum()), device=stored.device)
    groups = -(-packed.shape[1] // size_of(packed.pattern))
    return untiled(places[..., None]).squeeze(-1)[: packed.shape[0], :groups]

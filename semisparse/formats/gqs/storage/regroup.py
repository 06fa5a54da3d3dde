"""Slicing and concatenating stored weights: groups are moved as they are, nothing is quantised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.gqs.storage.disk import group_size
from semisparse.formats.gqs.storage.masks import in_mask_order, masks_of, starts_of, unchunked
from semisparse.patterns import Pattern
from semisparse.runtime.bits import bits_of


def regroup(parts: Sequence[Packed], dim: int, start: int, stop: int, pattern: Pattern) -> Packed:
    """Return rows (``dim`` 0) or columns (1) ``start`` to ``stop`` of weights concatenated along ``dim``.

    Args:
        parts: the weights.
        dim: 0 for rows, 1 for columns.
        start: first row or column.
        stop: end, exclusive.
        pattern: pattern of the result.
    Raises:
        FormatError: a group would be cut, or a short group would not be the last of its row.
    """
    size = group_size(pattern)
    whole = sum(part.shape[dim] for part in parts)
    edges = [start, *(part.shape[dim] for part in parts[:-1]), *([stop] if stop < whole else [])]
    if dim == 1 and any(edge % size for edge in edges):
        raise FormatError(f"groups of {size} columns cannot be cut or joined at columns {edges}")
    offsets = accumulate((int(part.params["kept"]) for part in parts), initial=0)
    indices = torch.cat([_indices(part, offset) for part, offset in zip(parts, offsets, strict=False)], dim)
    indices = indices[start:stop] if dim == 0 else indices[:, start // size : -(-stop // size)]
    masks = masks_of(indices >= 0)
    bits = bits_of(masks)
    order = in_mask_order(indices, bits)
    moved = {name: torch.cat([p.tensors[name] for p in parts])[order] for name in ("codes", "scale", "zero")}
    other = parts[0].shape[1 - dim]
    shape = (stop - start, other) if dim == 0 else (other, stop - start)
    params = Params(parts[0].params, rows=shape[0], kept=len(order))
    spec = replace(parts[0].spec, pattern=pattern, shape=shape, params=params)
    return Packed(spec, {"masks": masks, "starts": starts_of(bits), **moved})


def _indices(packed: Packed, offset: int) -> Tensor:
    """Return each group's index in the stored order plus ``offset``: [N, groups] int64, -1 if it is dropped."""
    bits = bits_of(packed.tensors["masks"])
    indices = torch.full_like(bits, -1, dtype=torch.int64)
    indices[bits] = torch.arange(offset, offset + int(bits.sum()), device=bits.device)
    groups = -(-packed.shape[1] // group_size(packed.pattern))
    return unchunked(indices[..., None]).squeeze(-1)[: packed.shape[0], :groups]

"""Cut and join weights whose tensors cannot be cut or joined one by one; nothing is quantised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.bitmask.storage.codes import code_bits, with_scale
from semisparse.formats.bitmask.storage.disk import BLOCK, pack
from semisparse.patterns import Pattern


def regroup(parts: Sequence[Packed], dim: int, start: int, stop: int, pattern: Pattern) -> Packed:
    """Join weights along ``dim``, cut rows or columns ``start`` to ``stop`` out of the result, and pack them.

    Args:
        parts: the weights, in the layout ``rows``.
        dim: 0 for rows, 1 for columns.
        start: first row or column.
        stop: one past the last.
        pattern: of the result.

    Raises:
        FormatError: columns that share a scale would be separated, or joined with others.
    """
    weight = torch.cat([part.unpack() for part in parts], dim).narrow(dim, start, stop - start).contiguous()
    bits = code_bits(parts[0].params)
    scales = with_scale(_scale(parts, dim, start, stop), bits) if bits else None
    params, tensors = pack(weight, pattern, str(parts[0].params.get("kind", "none")), scales)
    shape = (weight.shape[0], weight.shape[1])
    return Packed(replace(parts[0].spec, pattern=pattern, shape=shape, params=Params(params)), tensors)


def _scale(parts: Sequence[Packed], dim: int, start: int, stop: int) -> Tensor:
    whole = sum(part.shape[dim] for part in parts)
    edges = [start, *(part.shape[dim] for part in parts[:-1]), *([stop] if stop < whole else [])]
    if dim == 1 and any(edge % BLOCK for edge in edges):
        raise FormatError(
            f"{BLOCK} columns share a scale, so cutting or joining at columns {edges} would quantise a second time"
        )
    scale = torch.cat([part.tensors["scale"] for part in parts], dim)
    return scale[start:stop] if dim == 0 else scale[:, start // BLOCK : -(-stop // BLOCK)]

"""The layout on disk: groups of rows, windows of columns, and a slot for each kept vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec
from semisparse.patterns import Pattern, VectorNM

MAX_WINDOW = 256
"""Vectors per window: the position of a vector in its window is one byte."""
MAX_LENGTH = 128
"""Rows per vector. The last group of rows is padded to whole vectors: with longer ones, a small N is mostly padding."""

SPECS = (
    TensorSpec("values", None, ("groups", "slots", "length"), split_n=0, split_k=1),
    TensorSpec("positions", torch.uint8, ("groups", "slots"), split_n=0, split_k=1),
)


def vectors_of(pattern: Pattern) -> VectorNM:
    """Return the pattern as a `VectorNM`, the only family that the format stores.

    Raises:
        TypeError: it is of another family.
    """
    if not isinstance(pattern, VectorNM):
        raise TypeError(f"format vector_nm stores no {pattern}")
    return pattern


def accepts(pattern: Pattern) -> str | None:
    """Say why the format cannot store ``pattern``, or None if it can."""
    if not isinstance(pattern, VectorNM):
        return "it stores KEEP:WINDOWvLENGTH, such as 16:32v32 or 8:32v4 (16:32v1 for single weights)"
    if pattern.window > MAX_WINDOW:
        return f"a position in a window is one byte, so a window has at most {MAX_WINDOW} vectors, not {pattern.window}"
    if pattern.length > MAX_LENGTH:
        return f"a vector has at most {MAX_LENGTH} rows, not {pattern.length}"
    return None


def grain(spec: WeightSpec) -> tuple[int, int]:
    """Return the rows and columns at whose multiples the tensors may be cut: whole groups and windows."""
    vectors = vectors_of(spec.pattern)
    return vectors.length, vectors.window


def groups_and_slots(spec: WeightSpec) -> tuple[int, int]:
    """Count a weight's groups of rows, and the slots of each."""
    (n, k), vectors = spec.shape, vectors_of(spec.pattern)
    return -(-n // vectors.length), -(-k // vectors.window) * vectors.keep


def counts(spec: WeightSpec) -> Mapping[str, int]:
    """Return the named dimensions of the stored tensors.

    Raises:
        ValueError: the params name another N.
    """
    # The last group is padded, so the tensors alone do not determine N.
    if spec.params["rows"] != spec.shape[0]:
        raise ValueError(f"rows = {spec.params['rows']!r}, expected N = {spec.shape[0]}")
    groups, slots = groups_and_slots(spec)
    return {"groups": groups, "slots": slots, "length": vectors_of(spec.pattern).length}


def pack_weight(weight: Tensor, pattern: Pattern) -> tuple[Params, dict[str, Tensor]]:
    """Store, of each window and group of rows, ``keep`` vectors of ``weight`` ([N, K], obeying ``pattern``).

    A window with fewer non-zero vectors also stores its first all-zero vectors, ``keep`` in total; -0.0 becomes +0.0.

    Returns:
        params: ``rows``, N.
        tensors: as `SPECS` declares them.
    """
    vectors = vectors_of(pattern)
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % vectors.window, 0, -n % vectors.length))
    groups = padded.unflatten(0, (-1, vectors.length))
    stored = (groups != 0).any(1).unflatten(1, (-1, vectors.window))
    stored |= _lowest_unstored(stored, vectors.keep)
    shape = (groups.shape[0], stored.shape[1] * vectors.keep)
    positions = stored.nonzero()[:, 2].to(torch.uint8).view(shape)
    values = groups.transpose(1, 2)[stored.flatten(1)].view(*shape, vectors.length)
    return Params(rows=n), {"values": values + 0.0, "positions": positions}


def _lowest_unstored(stored: Tensor, keep: int) -> Tensor:
    """Mark, in each window with fewer than ``keep`` stored vectors, the first others to store: [..., window] bool."""
    missing = keep - stored.sum(-1, keepdim=True, dtype=torch.int16)
    return ~stored & ((~stored).cumsum(-1, dtype=torch.int16) <= missing)


def unpack(packed: Packed) -> Tensor:
    """Return the dense weight, [N, K] in its dtype."""
    n, k = packed.shape
    values = packed.tensors["values"]
    groups, slots, length = values.shape
    width = k + -k % vectors_of(packed.pattern).window
    weight = torch.zeros(groups, length, width, dtype=packed.dtype, device=values.device)
    weight.scatter_(2, columns_of(packed)[:, None].expand(groups, length, slots), values.transpose(1, 2))
    return weight.view(-1, width)[:n, :k].contiguous()


def columns_of(packed: Packed) -> Tensor:
    """Return the column of each slot, [groups, slots] int64. Vectors of columns K and above are zeros."""
    vectors = vectors_of(packed.pattern)
    positions = packed.tensors["positions"]
    slot = torch.arange(positions.shape[1], device=positions.device)
    return positions + slot // vectors.keep * vectors.window

"""Weights to kept vectors and their positions, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.vector_nm.layout import vectors_of
from semisparse.patterns import Pattern


def pack_weight(weight: Tensor, pattern: Pattern) -> tuple[Params, dict[str, Tensor]]:
    """Store, of each window and group of rows, ``keep`` vectors of ``weight`` ([N, K], obeying ``pattern``).

    A window with fewer vectors that are not zero is filled up with its lowest others; -0.0 becomes +0.0.

    Returns:
        params: ``rows``, N.
        tensors: as FORMAT declares them.
    """
    vectors = vectors_of(pattern)
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % vectors.window, 0, -n % vectors.length))
    groups = padded.unflatten(0, (-1, vectors.length))
    stored = (groups != 0).any(1).unflatten(1, (-1, vectors.window))
    stored |= _lowest_dead(stored, vectors.keep)
    shape = (groups.shape[0], stored.shape[1] * vectors.keep)
    positions = stored.nonzero()[:, 2].to(torch.uint8).view(shape)
    values = groups.transpose(1, 2)[stored.flatten(1)].view(*shape, vectors.length)
    return {"rows": n}, {"values": values + 0.0, "positions": positions}


def unpack(packed: Packed) -> Tensor:
    """Give the weight back, [N, K] in its dtype."""
    n, k = packed.shape
    values = packed.tensors["values"]
    groups, _, length = values.shape
    width = k + -k % vectors_of(packed.pattern).window
    weight = torch.zeros(groups, width, length, dtype=packed.dtype, device=values.device)
    weight.scatter_(1, columns_of(packed)[..., None].expand_as(values), values)
    return weight.transpose(1, 2).reshape(-1, width)[:n, :k].contiguous()


def columns_of(packed: Packed) -> Tensor:
    """Give the column of each slot, [groups, slots] int64; one past K belongs to a vector of zeros."""
    vectors = vectors_of(packed.pattern)
    positions = packed.tensors["positions"]
    slot = torch.arange(positions.shape[1], device=positions.device)
    return positions + slot // vectors.keep * vectors.window


def check_content(packed: Packed) -> None:
    """Check that positions increase and stay inside their windows, and that what lies past N or K is zero.

    Raises:
        FormatError: names the tensor, the group, the slot and what is wrong.
    """
    vectors = vectors_of(packed.pattern)
    n, k = packed.shape
    values, positions = packed.tensors["values"], packed.tensors["positions"]
    if positions.max() >= vectors.window:
        outside = positions > vectors.window - 1  # a uint8, which 256 is not
        _refuse_first(outside, "positions", f"not below the window's {vectors.window} vectors")
    same_window = torch.arange(1, positions.shape[1], device=positions.device) % vectors.keep != 0
    backwards = (positions[:, 1:] <= positions[:, :-1]) & same_window
    _refuse_first(backwards, "positions", "not above the one before it", (0, 1))
    # Only the last window reaches past K, only the last group past N: of the other values none is read.
    last = values.shape[1] - vectors.keep
    dead = (columns_of(packed)[:, last:] >= k)[..., None] & (values[:, last:] != 0)
    _refuse_first(dead, "values", f"a weight past column K = {k} is not zero", (0, last, 0))
    rows = values.shape[2] - (-n % values.shape[2])
    past_n = values[-1:, :, rows:] != 0
    _refuse_first(past_n, "values", f"a weight past row N = {n} is not zero", (len(values) - 1, 0, rows))


def _refuse_first(bad: Tensor, tensor: str, what: str, start: tuple[int, ...] = (0, 0)) -> None:
    """Raise `FormatError` for the first place of ``tensor`` that is ``bad``, which begins at ``start``."""
    if bad.count_nonzero():  # five times as fast as `any` on a CPU
        place = [first + at for first, at in zip(start, bad.nonzero()[0].tolist(), strict=True)]
        raise FormatError(f"tensor {tensor}, at {place}: {what}")


def _lowest_dead(stored: Tensor, keep: int) -> Tensor:
    """Mark, in each window ([..., window] bool), as many of the lowest unstored vectors as are missing to ``keep``."""
    missing = keep - stored.sum(-1, keepdim=True, dtype=torch.int16)
    dead = ~stored
    return dead & (dead.cumsum(-1, dtype=torch.int16) <= missing)

"""What the formats' checks of params and stored tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
from semisparse.formats.codes import Codes
from semisparse.patterns import Group, Unstructured

Choice = TypeVar("Choice", int, str)


def choice_of(form: str, params: Params, key: str, choices: Sequence[Choice], default: Choice | None = None) -> Choice:
    """Give the value that ``params`` have for ``key``, one of ``choices``.

    Args:
        form: the format's name, for the message.
        default: what holds where ``params`` have none; None if they must.
    Raises:
        FormatError: it is none of them.
    """
    found = params.get(key, default)
    for choice in choices:
        if found == choice and type(found) is type(choice):
            return choice
    raise FormatError(f"format {form} has no {key} {found!r}; it has {', '.join(map(str, choices))}")


def refuse_first(bad: Tensor, tensor: str, what: str, start: Sequence[int] = ()) -> None:
    """Refuse a tensor for the first of its places that is bad.

    Args:
        bad: bool, of the tensor's places or of a part of them.
        tensor: its name.
        what: is wrong there.
        start: where the part begins, a number a dimension; () for the whole tensor.
    Raises:
        FormatError: a place is bad; names it.
    """
    if bad.count_nonzero():  # five times as fast as `any` on a CPU
        place = bad.nonzero()[0].tolist()
        place = [first + at for first, at in zip(start or [0] * len(place), place, strict=True)]
        raise FormatError(f"tensor {tensor}, at {place}: {what}")


def refuse_infinite(values: Tensor, tensor: str) -> None:
    """Refuse values of which one is infinite or NaN.

    Args:
        values: float16, bfloat16 or float32, of any shape.
        tensor: its name.
    Raises:
        FormatError: names the first such place.
    """
    if not values.numel():
        return
    low, high = values.aminmax()  # NaN if any value is; 20 times as fast on a CPU as isfinite in 16 bits
    if not (low.isfinite() and high.isfinite()):
        refuse_first(~values.isfinite(), tensor, "the value is not finite")


def require_codes(codes: Codes, weight: Tensor, dtype: torch.dtype, bits: int, size: int) -> None:
    """Refuse codes that a packer was given for a weight and are not for it.

    Args:
        codes: the numbers that the weight was rounded to.
        weight: [N, K].
        dtype: of the values that the packer stores.
        bits: per value.
        size: columns per scale.
    Raises:
        FormatError: a dtype, shape or size is another; says which was expected.
    """
    (n, k), zero = weight.shape, codes.zero
    tiles = (n, -(-k // size))
    given = (codes.values.dtype, tuple(codes.values.shape), codes.bits, codes.size, tuple(codes.scale.shape))
    expected = (dtype, (n, k), bits, size, tiles)
    if given != expected or (zero is not None and tuple(zero.shape) != tiles):
        raise FormatError(f"codes are (dtype, shape, bits, size, scales) {given}, expected {expected}")


def share_violation(packed: Packed, kept: Tensor, unit: int = 1) -> str | None:
    """Describe where a weight keeps more than a pattern that bounds a share, such as ``70%`` or ``g16@50%``, allows.

    Args:
        packed: the weight; of one with another pattern nothing is described.
        kept: [N] int64, weights or groups of weights that each row keeps.
        unit: weights per such group.
    Returns:
        A sentence, or None if there is no such place.
    """
    pattern, (n, k) = packed.pattern, packed.shape
    if not isinstance(pattern, Unstructured | Group):
        return None
    # As `Pattern.violation`: pruners round the number per row.
    slack = max(1, (pattern.size if isinstance(pattern, Group) else 1) // unit)
    if pattern.by_row:
        allowed = pattern.kept((1, k)) // unit + slack
        bad = (kept > allowed).nonzero()
        return f"row {int(bad[0])} keeps {int(kept[bad[0]])}, {allowed} are allowed" if len(bad) else None
    allowed, found = pattern.kept((n, k)) // unit + n * slack, int(kept.sum())
    return f"{found} are kept, {allowed} are allowed" if found > allowed else None

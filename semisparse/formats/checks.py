"""What the formats' checks of params and stored tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Packed, Params
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


def row_scales(scales: Tensor, weight: Tensor) -> Tensor:
    """Return scales that a packer was given, as float32 on the weight's device.

    Args:
        scales: [N] float.
        weight: [N, K].
    Raises:
        FormatError: they are another number, or one is not finite and above 0.
    """
    if tuple(scales.shape) != (len(weight),):
        raise FormatError(f"scales are {list(scales.shape)}, expected {[len(weight)]}: one per row of the weight")
    scales = scales.to(weight.device, torch.float32)
    valid = scales.isfinite() & (scales > 0)
    if not valid.all():
        row = int((~valid).nonzero()[0])
        raise FormatError(f"the scale of row {row} is {float(scales[row])}, expected a finite number above 0")
    return scales


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

"""What the formats' checks of params and stored tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.base import Params

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

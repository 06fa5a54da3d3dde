"""What the checks of stored tensors share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from semisparse.errors import FormatError


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

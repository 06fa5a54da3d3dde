"""Checks of params, stored tensors and patterns that several formats use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from semisparse.errors import FormatError
from semisparse.formats.codes import Codes
from semisparse.formats.packed import Packed
from semisparse.formats.spec import Params
from semisparse.patterns import Group, Unstructured

Choice = TypeVar("Choice", int, str)


def choice_of(form: str, params: Params, key: str, choices: Sequence[Choice], default: Choice | None = None) -> Choice:
    """Return ``params[key]``, which must be one of ``choices``.

    Args:
        form: the format's name, for the message.
        params: the params of a weight.
        key: the name of one of them.
        choices: its valid values.
        default: the value if ``params`` lack the key; None if they must have it.
    Raises:
        FormatError: the value is none of ``choices``.
    """
    value = params.get(key, default)
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    raise FormatError(f"format {form} has no {key} {value!r}; it has {', '.join(map(str, choices))}")


def refuse_first(bad: Tensor, tensor: str, what: str, start: Sequence[int] = ()) -> None:
    """Refuse a tensor with a wrong element.

    Args:
        bad: bool, true where an element of the tensor, or of a slice of it, is wrong.
        tensor: its name.
        what: says what is wrong, for the message.
        start: the index in the tensor of the slice's first element; () for the whole tensor.
    Raises:
        FormatError: an element is wrong; names the index of the first.
    """
    if bad.count_nonzero():  # five times as fast as `any` on a CPU
        index = bad.nonzero()[0].tolist()
        index = [offset + i for offset, i in zip(start or [0] * len(index), index, strict=True)]
        raise FormatError(f"tensor {tensor}, at {index}: {what}")


def refuse_infinite(values: Tensor, tensor: str) -> None:
    """Refuse a tensor with an infinite value or a NaN.

    Args:
        values: float16, bfloat16 or float32, of any shape.
        tensor: its name.
    Raises:
        FormatError: names the index of the first.
    """
    if not values.numel():
        return
    low, high = values.aminmax()  # NaN if any value is; 20 times as fast on a CPU as isfinite in 16 bits
    if not (low.isfinite() and high.isfinite()):
        refuse_first(~values.isfinite(), tensor, "the value is not finite")


def require_codes(codes: Codes, weight: Tensor, dtype: torch.dtype, bits: int, size: int) -> None:
    """Refuse codes that do not fit the weight that they are packed for.

    Args:
        codes: the codes of the quantised weight.
        weight: [N, K].
        dtype: dtype of the values that the packer stores.
        bits: bits per value.
        size: columns per scale.
    Raises:
        FormatError: a dtype, shape or size differs; says what was expected.
    """
    (n, k), zero = weight.shape, codes.zero
    tiles = (n, -(-k // size))
    given = (codes.values.dtype, tuple(codes.values.shape), codes.bits, codes.size, tuple(codes.scale.shape))
    expected = (dtype, (n, k), bits, size, tiles)
    if given != expected or (zero is not None and tuple(zero.shape) != tiles):
        raise FormatError(f"codes are (dtype, shape, bits, size, scales) {given}, expected {expected}")


def share_violation(packed: Packed, kept: Tensor, unit: int = 1) -> str | None:
    """Describe where a weight keeps more than an unstructured (``70%``) or group pattern (``g16@50%``) allows.

    Args:
        packed: the weight.
        kept: [N] int64, the number of weights, or of groups of weights, that each row keeps.
        unit: weights per group that ``kept`` counts; 1 if it counts weights.
    Returns:
        A sentence; None if nothing is wrong or the pattern is another.
    """
    pattern, (n, k) = packed.pattern, packed.shape
    if not isinstance(pattern, Unstructured | Group):
        return None
    # As in `Pattern.violation`, one more per row is accepted: pruners round the number per row.
    slack = max(1, (pattern.size if isinstance(pattern, Group) else 1) // unit)
    if pattern.by_row:
        allowed = pattern.kept((1, k)) // unit + slack
        bad = (kept > allowed).nonzero()
        return f"row {int(bad[0])} keeps {int(kept[bad[0]])}, {allowed} are allowed" if len(bad) else None
    allowed, total = pattern.kept((n, k)) // unit + n * slack, int(kept.sum())
    return f"{total} are kept, {allowed} are allowed" if total > allowed else None

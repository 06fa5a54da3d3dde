"""A weight in a format, named or the smallest."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from semisparse.errors import InputError
from semisparse.formats import Packed, registry
from semisparse.formats.base import get_format
from semisparse.patterns import Pattern, parse_pattern

SAMPLE_ROWS = 256
"""Rows of a weight that formats are compared on by ``format: auto``."""


def pack(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Store a weight in a format, in the layout that the kernels of its device want.

    Args:
        weight: [N, K], float16, bfloat16 or float32, obeying the pattern.
        format: a format's name, or ``auto`` for the lossless one that takes the fewest bytes.
        pattern: as `parse_pattern` reads it.
        options: the format's own.
    Raises:
        InputError: the format is unknown or cannot store this; `PatternError` names the row and block.
    """
    return pack_for_disk(weight, format, pattern, **options).to(weight.device)


def pack_for_disk(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Store a weight as `pack` does, in the layout that a checkpoint has."""
    pattern = parse_pattern(pattern)
    name = _smallest_format(weight, pattern) if format == "auto" else format
    return get_format(name).pack(weight, pattern, **options)


def _smallest_format(weight: Tensor, pattern: Pattern) -> str:
    sample = weight[:SAMPLE_ROWS]
    sizes = {
        form.name: sum(t.numel() * t.element_size() for t in form.pack_weight(sample, pattern)[1].values())
        for form in registry().values()
        if form.lossless and form.accepts(pattern) is None
    }
    if not sizes:
        raise InputError(f"no lossless format stores pattern {pattern}; name one with format=NAME")
    return min(sizes, key=lambda name: sizes[name])

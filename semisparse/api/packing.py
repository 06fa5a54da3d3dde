"""Packing a weight into a named format, or into the one that needs the fewest bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from semisparse.errors import FormatError, InputError
from semisparse.formats import Packed, registry
from semisparse.formats.base import get_format, require_dense
from semisparse.patterns import Pattern, parse_pattern
from semisparse.runtime.modes import thread_defaults

SAMPLE_ROWS = 256
"""Rows of a weight that ``format="auto"`` packs into every format to compare their sizes."""


@thread_defaults()
def pack(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Pack a weight into a format, in the layout that the kernels of its device read.

    Args:
        weight: [N, K], float16, bfloat16 or float32, obeying the pattern.
        format: a format's name, or ``auto`` for the lossless format that needs the fewest bytes.
        pattern: such as ``6:8``; see `parse_pattern`.
        options: the format's pack options.
    Raises:
        PatternError: the weight violates the pattern; names the first offending row and columns.
        InputError: the format is unknown, or cannot store the pattern or the weight.
    """
    return pack_for_disk(weight, format, pattern, **options).to(weight.device)


def pack_for_disk(weight: Tensor, format: str, pattern: str | Pattern, **options: Any) -> Packed:
    """Pack a weight as `pack` does, in the layout on disk."""
    pattern = parse_pattern(pattern)
    name = _smallest_format(weight, pattern) if format == "auto" else format
    return get_format(name).pack(weight, pattern, **options)


def _smallest_format(weight: Tensor, pattern: Pattern) -> str:
    require_dense(weight)
    if weight.dim() != 2 or not weight.numel():
        raise FormatError(f"a weight is [N, K] with N, K of at least 1, got {list(weight.shape)}")
    sample = weight[:SAMPLE_ROWS]
    sizes = {
        form.name: sum(t.numel() * t.element_size() for t in form.pack_weight(sample, pattern)[1].values())
        for form in registry().values()
        if form.lossless and form.accepts(pattern) is None
    }
    if not sizes:
        raise InputError(f"no lossless format stores pattern {pattern}; name one with format=NAME")
    return min(sizes, key=lambda name: sizes[name])

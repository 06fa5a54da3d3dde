"""Slicing packed weights along N or K for tensor parallelism, and concatenating the slices again.

`Format.grain(spec)` returns (rows, columns): the stored tensors can be sliced at multiples of them. They
are, if a slice starts at such a multiple, and ends at one or at the end of the weight. Tensors with a split dimension
(`TensorSpec.split_n`, `TensorSpec.split_k`) are narrowed, the others are kept whole. Otherwise, or if no
tensor has a split dimension, the weight is repacked: unpacked, sliced and packed again. Repacking raises FormatError if
the result would not unpack to the same values. A weight that is sliced without repacking keeps the pattern of the whole
weight, even where it no longer holds exactly: a slice of a ``70%`` weight may not have 70 % zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from semisparse.errors import FormatError
from semisparse.formats.base import Format, Packed, Params, WeightSpec, get_format

if TYPE_CHECKING:
    from semisparse.patterns import Pattern


def slice_weight(packed: Packed, dim: int, start: int, stop: int) -> Packed:
    """Return rows or columns ``start`` to ``stop`` (exclusive) of a packed weight.

    The full range returns ``packed`` itself, not a copy. Tensors without a split dimension are shared with ``packed``.

    Args:
        packed: the weight [N, K].
        dim: 0 for rows (N), 1 for columns (K).
        start: the first row or column.
        stop: one past the last.
    Raises:
        FormatError: the range is empty or outside the weight.
        FormatError: the slice must be repacked, and that would quantise it a second time, or needs a pattern that the
            format does not support.
    """
    size = packed.shape[dim]
    if not 0 <= start < stop <= size:
        raise FormatError(
            f"a weight {list(packed.shape)} has no slice {start} to {stop} along dimension {dim}: "
            f"expected 0 <= start < stop <= {size}"
        )
    if (start, stop) == (0, size):
        return packed
    if _is_on_grain(packed.spec, dim, start, stop):
        return _slice_tensors(get_format(packed.spec.format), packed, dim, start, stop)
    try:
        return _repack([packed], dim, start, stop, packed.pattern.patterns_of_slice())
    except FormatError as error:
        raise FormatError(_refusal(packed.spec, dim, start, stop, error)) from error


def check_slice(spec: WeightSpec, dim: int, start: int, stop: int) -> None:
    """Refuse, before any tensor is loaded, columns that no part of such a weight can be.

    Such columns start inside a window of a pattern that the format needs, or separate columns that share a scale.
    `slice_weight` may still refuse other slices, when it repacks the weight. Of the second kind it takes those that
    happen to get the same scales again, which the spec does not say.

    Args:
        spec: the spec of the weight [N, K].
        dim: as in `slice_weight`, with ``start`` and ``stop``.
    Raises:
        FormatError: the format supports none of the patterns that the slice could have, or would quantise it again.
    """
    columns = spec.shape[1]
    if dim == 0 or (start, stop) == (0, columns) or _is_on_grain(spec, dim, start, stop):
        return
    form = get_format(spec.format)
    looser = [pattern for pattern in spec.pattern.patterns_of_slice() if pattern != spec.pattern]
    if start % spec.pattern.step and all(form.accepts(pattern) is not None for pattern in looser):
        reason = f"it begins inside a window of {spec.pattern.step} columns"
        raise FormatError(_refusal(spec, dim, start, stop, reason))
    shared = form.scale_columns(spec)
    if start % shared or (stop % shared and stop != columns):
        reason = f"{shared} columns share a scale, so repacking would quantise the weights a second time"
        raise FormatError(_refusal(spec, dim, start, stop, reason))


def _is_on_grain(spec: WeightSpec, dim: int, start: int, stop: int) -> bool:
    """Return whether the stored tensors can be sliced at ``start`` and ``stop``."""
    grain = _grain(spec, dim)
    return grain is not None and start % grain == 0 and (stop % grain == 0 or stop == spec.shape[dim])


def _refusal(spec: WeightSpec, dim: int, start: int, stop: int, reason: object) -> str:
    axis, grain = ("rows", "columns")[dim], _grain(spec, dim)
    advice = f"slice it at multiples of {grain} {axis}" if grain else f"its tensors cannot be sliced along {axis}"
    return (
        f"cannot slice {axis} {start} to {stop} of a weight in format {spec.format}: {reason}; {advice} "
        f"(pattern {spec.pattern}, params {dict(spec.params)})"
    )


def concatenate_weights(parts: Sequence[Packed], dim: int, pattern: Pattern) -> Packed:
    """Concatenate the slices of one weight. The result unpacks to exactly the values of the slices.

    A single slice is returned unchanged, whatever ``pattern`` says.

    Args:
        parts: the slices along ``dim``, in order.
        dim: 0 for slices of rows (N), 1 for slices of columns (K).
        pattern: the pattern of the whole weight.
    Raises:
        FormatError: the slices must be repacked, and that would quantise the weight a second time, or needs a pattern
            that the format does not support.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    form = get_format(first.spec.format)
    if _can_concatenate(parts, dim) and all(equal_except_shape(p, first) and p.pattern == pattern for p in parts):
        return _concatenate_tensors(form, parts, dim)
    return _repack(parts, dim, 0, sum(part.shape[dim] for part in parts), [pattern])


def equal_except_shape(one: Packed, other: Packed) -> bool:
    """Return whether the specs of two weights are equal except for their shapes."""
    return spec_with_shape(one.spec, (0, 0)) == spec_with_shape(other.spec, (0, 0))


def spec_with_shape(spec: WeightSpec, shape: tuple[int, int]) -> WeightSpec:
    """Return a spec with another shape [N, K]. The parameter ``rows`` of some formats is set to N too."""
    params = {**spec.params, "rows": shape[0]} if "rows" in spec.params else spec.params
    return replace(spec, shape=shape, params=Params(params))


def split_dims(spec: WeightSpec, dim: int) -> dict[str, int | None]:
    """Return each stored tensor's split dimension by name: ``split_n`` for ``dim`` 0, ``split_k`` for ``dim`` 1."""
    form = get_format(spec.format)
    return {tensor.name: tensor.split_k if dim else tensor.split_n for tensor in form.specs(spec)}


def _grain(spec: WeightSpec, dim: int) -> int | None:
    """Return the grain along ``dim``, at whose multiples the tensors can be sliced; None if they cannot."""
    form = get_format(spec.format)
    if form.grain is None or set(split_dims(spec, dim).values()) == {None}:
        return None
    return form.grain(spec)[dim]


def _can_concatenate(parts: Sequence[Packed], dim: int) -> bool:
    """Return whether the tensors can be concatenated: every part but the last is a multiple of the grain."""
    grain = _grain(parts[0].spec, dim)
    return grain is not None and all(part.shape[dim] % grain == 0 for part in parts[:-1])


def _slice_tensors(form: Format, packed: Packed, dim: int, start: int, stop: int) -> Packed:
    """Slice every tensor that has a split dimension.

    A tensor is narrowed to [a, b) along its split dimension, where a and b are its sizes there for weights of ``start``
    and of ``stop`` rows (or columns).
    """

    def tensor_shapes(size: int) -> dict[str, tuple[int, ...]]:
        n, k = (size, packed.shape[1]) if dim == 0 else (packed.shape[0], size)
        return form.shapes(spec_with_shape(packed.spec, (n, k)))

    ends = tensor_shapes(stop)
    starts = tensor_shapes(start) if start else {name: (0,) * len(shape) for name, shape in ends.items()}
    splits = split_dims(packed.spec, dim)
    tensors = {}
    for name, tensor in packed.tensors.items():
        split = splits[name]
        if split is not None:
            part = tensor.narrow(split, starts[name][split], ends[name][split] - starts[name][split])
            tensor = part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole in memory
        tensors[name] = tensor
    n, k = packed.shape
    shape = (stop - start, k) if dim == 0 else (n, stop - start)
    return Packed(spec_with_shape(packed.spec, shape), tensors)


def _concatenate_tensors(form: Format, parts: Sequence[Packed], dim: int) -> Packed:
    """Concatenate every tensor along its split dimension; those without one are the first part's."""
    first, tensors = parts[0], dict(parts[0].tensors)
    for name, split in split_dims(first.spec, dim).items():
        if split is not None:
            tensors[name] = torch.cat([part.tensors[name] for part in parts], split)
    length = sum(part.shape[dim] for part in parts)
    shape = (length, first.shape[1]) if dim == 0 else (first.shape[0], length)
    return Packed(spec_with_shape(first.spec, shape), tensors)


def _repack(parts: Sequence[Packed], dim: int, start: int, stop: int, patterns: Iterable[Pattern]) -> Packed:
    """Unpack and concatenate ``parts``, then pack rows or columns ``start`` to ``stop``.

    The result gets the first of ``patterns`` that the format supports and that it obeys. Formats that define
    `Format.regroup` repack with it, which rounds nothing again. Other formats repack with `Format.pack`, passing the
    stored params that are options of `Format.pack_weight`.
    """
    form = get_format(parts[0].spec.format)
    weight = torch.cat([part.unpack() for part in parts], dim).narrow(dim, start, stop - start).contiguous()
    tried = list(patterns)
    option_names = inspect.signature(form.pack_weight).parameters
    options = {name: value for name, value in parts[0].params.items() if name in option_names}
    for pattern in tried:
        if form.accepts(pattern) is None and pattern.violation(weight != 0) is None:
            if form.regroup:
                packed = form.regroup(parts, dim, start, stop, pattern)
            else:
                packed = form.pack(weight, pattern, **options)
            if not torch.equal(packed.unpack(), weight):
                raise FormatError("repacking would quantise the weights a second time")
            return packed
    raise FormatError(
        f"none of the patterns {', '.join(map(str, tried))} holds for it and is supported by format {form.name}"
    )

"""Parts of packed weights: what one rank of tensor parallelism holds, and putting parts together again.

Tensors that a format declares a split for are sliced. A weight of any other format, or one cut beside the format's
grain, is unpacked, cut and packed anew, which is refused where that would round it a second time. A sliced part keeps
the whole's pattern, of which a share of zeros counts over the whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from semisparse.errors import FormatError
from semisparse.formats.base import Format, Packed, Params, TensorSpec, WeightSpec, get_format

if TYPE_CHECKING:
    from semisparse.patterns import Pattern


def cut(packed: Packed, dim: int, start: int, stop: int) -> Packed:
    """Give some rows or columns of a packed weight.

    Args:
        packed: the weight [N, K].
        dim: 0 to cut along N, 1 to cut along K.
        start: the first row or column of the part.
        stop: the one behind its last.
    Raises:
        FormatError: the part can be had only by rounding weights a second time, or there is no such part.
    """
    size = packed.shape[dim]
    if not 0 <= start < stop <= size:
        raise FormatError(
            f"a weight [N, K] of {list(packed.shape)} has no part {start} to {stop} along dimension {dim}"
        )
    if (start, stop) == (0, size):
        return packed
    form = get_format(packed.spec.format)
    splits = _splits(form, packed, dim)
    grain = _grain(form, packed, dim)
    if grain and start % grain == 0 and (stop % grain == 0 or stop == size):
        return _sliced(form, packed, splits, dim, start, stop)
    try:
        return _packed_anew([packed], dim, start, stop, packed.pattern.of_part())
    except FormatError as error:
        names = ("rows", "columns")[dim]
        raise FormatError(
            f"{names} {start} to {stop} cannot be cut from a weight in format {form.name} ({packed.pattern}, "
            f"{dict(packed.params)}): {error}. Its tensors may be cut at multiples of {grain or size} {names}"
        ) from error


def join(parts: Sequence[Packed], dim: int, pattern: Pattern) -> Packed:
    """Put parts of one weight together again: what `cut` undoes, to the same bytes.

    Args:
        parts: along dimension ``dim``, in order.
        dim: 0 for parts along N, 1 along K.
        pattern: of the whole weight.
    Raises:
        FormatError: the whole can be had only by rounding weights a second time.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    form = get_format(first.spec.format)
    splits = _splits(form, first, dim)
    if _on_grain(form, parts, dim) and all(_alike(part, first) and part.pattern == pattern for part in parts):
        return _concatenated(parts, splits, dim)
    return _packed_anew(parts, dim, 0, sum(part.shape[dim] for part in parts), [pattern])


def stacked(weights: Sequence[Packed]) -> list[Packed]:
    """Put weights of one K above one another where their tensors join, so that one product computes them all.

    Args:
        weights: each in the layout on disk.
    Returns:
        In the same order, as few weights as possible.
    """
    found = [weights[0]]
    for below in weights[1:]:
        both = stacked_on_grain([found[-1], below])
        if both is None or both.shape[0] != found[-1].shape[0] + below.shape[0]:
            found.append(below)
        else:
            found[-1] = both
    return found


def first_rows(weights: Sequence[Packed]) -> list[int]:
    """Give the rows that `stacked_on_grain` has the weights begin at, and the one behind the last."""
    first = weights[0]
    form = get_format(first.spec.format)
    grain = 1 if form.grain is None else form.grain(first.spec)[0]
    rows = [0]
    for weight in weights[:-1]:
        rows.append(rows[-1] + -(-weight.shape[0] // grain) * grain)
    return [*rows, rows[-1] + weights[-1].shape[0]]


def stacked_on_grain(weights: Sequence[Packed]) -> Packed | None:
    """Put weights of one K above one another, rows of zeros between them up to the format's grain.

    Args:
        weights: each in the layout on disk.
    Returns:
        One weight, which begins each of them where `first_rows` says; None if their tensors do not join.
    """
    first = weights[0]
    if any(_declared(weight) != _declared(first) for weight in weights):
        return None
    form, rows = get_format(first.spec.format), first_rows(weights)[-1]
    params: Mapping[str, int | float | str] | None
    if form.stack is not None:
        params = form.stack(weights, rows)
    else:
        splits = _splits(form, first, 0)
        joins = form.grain is not None and None not in splits.values() and all(_alike(w, first) for w in weights)
        params = _spec_of_part(first.spec, (rows, 0)).params if joins else None
    if params is None:
        return None
    tensors = {}
    for spec in form.specs(first.spec):
        parts = [weight.tensors[spec.name] for weight in weights]
        if _holds_offsets(spec):
            ends = torch.stack([part[-1] for part in parts]).cumsum(0, dtype=parts[0].dtype)
            parts = parts[:1] + [part[1:] + end for part, end in zip(parts[1:], ends, strict=False)]
        tensors[spec.name] = torch.cat(parts, spec.split_n or 0)
    return Packed(replace(first.spec, shape=(rows, first.shape[1]), params=Params(params)), tensors)


def unstacked(whole: Packed, declared: Sequence[Packed]) -> list[Packed]:
    """Undo `stacked_on_grain`, to the same bytes.

    Args:
        whole: in the layout on disk.
        declared: the weights that it was made of; their tensors are not asked for.
    """
    form = get_format(whole.spec.format)
    found, at = [], dict.fromkeys(whole.tensors, 0)
    for weight in declared:
        shapes, tensors = form.shapes(weight.spec), {}
        for spec in form.specs(weight.spec):
            name, dim, more = spec.name, spec.split_n or 0, int(_holds_offsets(spec))
            length = shapes[name][dim]
            tensor = whole.tensors[name].narrow(dim, at[name], length)
            at[name] += length - more
            # Views would keep the whole in memory.
            tensors[name] = tensor - tensor[0] if more else tensor.clone(memory_format=torch.contiguous_format)
        found.append(Packed(weight.spec, tensors))
    return found


def _holds_offsets(spec: TensorSpec) -> bool:
    return spec.shape[0].endswith("+1")


def _declared(packed: Packed) -> tuple[object, ...]:
    spec = packed.spec
    return spec.format, spec.version, spec.pattern, spec.dtype, spec.shape[1]


def _alike(one: Packed, other: Packed) -> bool:
    """Whether two weights are declared alike, but for their shapes."""
    return _spec_of_part(one.spec, (0, 0)) == _spec_of_part(other.spec, (0, 0))


def _splits(form: Format, packed: Packed, dim: int) -> dict[str, int | None]:
    return {tensor.name: tensor.split_k if dim else tensor.split_n for tensor in form.specs(packed.spec)}


def _grain(form: Format, packed: Packed, dim: int) -> int | None:
    """Give the rows or columns at whose multiples the tensors may be sliced; None if they may not."""
    if form.grain is None or set(_splits(form, packed, dim).values()) == {None}:
        return None
    return form.grain(packed.spec)[dim]


def _on_grain(form: Format, parts: Sequence[Packed], dim: int) -> bool:
    grain = _grain(form, parts[0], dim)
    return grain is not None and all(part.shape[dim] % grain == 0 for part in parts[:-1])


def _sliced(form: Format, packed: Packed, splits: dict[str, int | None], dim: int, start: int, stop: int) -> Packed:
    """Slice every tensor with a split, from where the tensor of a weight that ends at ``start`` would end."""

    def ends(at: int) -> dict[str, tuple[int, ...]]:
        n, k = (at, packed.shape[1]) if dim == 0 else (packed.shape[0], at)
        return form.shapes(_spec_of_part(packed.spec, (n, k)))

    last = ends(stop)
    first = ends(start) if start else {name: (0,) * len(shape) for name, shape in last.items()}
    tensors = {}
    for name, tensor in packed.tensors.items():
        split = splits[name]
        if split is not None:
            part = tensor.narrow(split, first[name][split], last[name][split] - first[name][split])
            tensor = part.clone(memory_format=torch.contiguous_format)  # a view would keep the whole in memory
        tensors[name] = tensor
    n, k = packed.shape
    shape = (stop - start, k) if dim == 0 else (n, stop - start)
    return Packed(_spec_of_part(packed.spec, shape), tensors)


def _concatenated(parts: Sequence[Packed], splits: dict[str, int | None], dim: int) -> Packed:
    first = parts[0]
    tensors = {
        name: tensor if splits[name] is None else torch.cat([part.tensors[name] for part in parts], splits[name] or 0)
        for name, tensor in first.tensors.items()
    }
    length = sum(part.shape[dim] for part in parts)
    shape = (length, first.shape[1]) if dim == 0 else (first.shape[0], length)
    return Packed(_spec_of_part(first.spec, shape), tensors)


def _spec_of_part(spec: WeightSpec, shape: tuple[int, int]) -> WeightSpec:
    """Return the spec of a part of this shape: formats whose tensors do not tell N keep it as ``rows``."""
    params = {**spec.params, "rows": shape[0]} if "rows" in spec.params else spec.params
    return replace(spec, shape=shape, params=Params(params))


def _packed_anew(parts: Sequence[Packed], dim: int, start: int, stop: int, patterns: Iterable[Pattern]) -> Packed:
    """Pack a part of parts side by side, under the first pattern that it obeys, with the options that params keep."""
    form = get_format(parts[0].spec.format)
    weight = torch.cat([part.unpack() for part in parts], dim).narrow(dim, start, stop - start).contiguous()
    taken = inspect.signature(form.pack_weight).parameters
    options = {name: value for name, value in parts[0].params.items() if name in taken}
    for candidate in patterns:
        if form.accepts(candidate) is None and candidate.violation(weight != 0) is None:
            if form.regroup:
                packed = form.regroup(parts, dim, start, stop, candidate)
            else:
                packed = form.pack(weight, candidate, **options)
            if not torch.equal(packed.unpack(), weight):
                raise FormatError("packing it anew would round its weights a second time")
            return packed
    raise FormatError("it obeys no pattern that the format takes")

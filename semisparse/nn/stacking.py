"""Stacking packed weights [N_i, K] along N, so that one matmul computes them all, and undoing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from semisparse.formats.base import Packed, Params, TensorSpec, WeightSpec, get_format
from semisparse.nn.slicing import equal_except_shape, spec_with_shape, split_dims


def stack_neighbours(weights: Sequence[Packed]) -> list[Packed]:
    """Stack each weight on its predecessor where that needs no padding rows.

    Args:
        weights: [N_i, K] each, in the layout on disk.
    Returns:
        As few weights as possible, in the same order.
    """
    stacks = [weights[0]]
    for weight in weights[1:]:
        both = stack_with_padding([stacks[-1], weight])
        if both is None or both.shape[0] != stacks[-1].shape[0] + weight.shape[0]:
            stacks.append(weight)
        else:
            stacks[-1] = both
    return stacks


def row_offsets(specs: Sequence[WeightSpec]) -> list[int]:
    """Return the first row of each weight in the stack of `stack_with_padding` and, last, the stack's number of rows.

    Every weight begins at a multiple of the format's grain.
    """
    form = get_format(specs[0].format)
    grain = 1 if form.grain is None else form.grain(specs[0])[0]
    rows = [0]
    for spec in specs[:-1]:
        rows.append(rows[-1] + -(-spec.shape[0] // grain) * grain)
    return [*rows, rows[-1] + specs[-1].shape[0]]


def stack_with_padding(weights: Sequence[Packed]) -> Packed | None:
    """Concatenate weights along N.

    Each starts at a multiple of the format's row grain; the gap is the zero padding that the stored tensors already
    hold.

    Args:
        weights: [N_i, K] each, in the layout on disk.
    Returns:
        One weight, in which each begins at its `row_offsets`; None if their tensors cannot be concatenated.
    """
    first = weights[0]
    if any(_identity(weight) != _identity(first) for weight in weights):
        return None
    form, rows = get_format(first.spec.format), row_offsets([weight.spec for weight in weights])[-1]
    params: Mapping[str, int | float | str] | None
    if form.stack is not None:
        params = form.stack(weights, rows)
    else:
        splits = split_dims(first.spec, 0)
        joins = form.grain is not None and None not in splits.values()
        joins = joins and all(equal_except_shape(weight, first) for weight in weights)
        params = spec_with_shape(first.spec, (rows, 0)).params if joins else None
    if params is None:
        return None
    tensors = {}
    for spec in form.specs(first.spec):
        parts = [weight.tensors[spec.name] for weight in weights]
        if _holds_offsets(spec):
            # Offsets begin at 0: those of each later weight continue from the last offset before it.
            ends = torch.stack([part[-1] for part in parts]).cumsum(0, dtype=parts[0].dtype)
            parts = parts[:1] + [part[1:] + end for part, end in zip(parts[1:], ends, strict=False)]
        tensors[spec.name] = torch.cat(parts, spec.split_n or 0)
    return Packed(replace(first.spec, shape=(rows, first.shape[1]), params=Params(params)), tensors)


def unstack(stack: Packed, specs: Sequence[WeightSpec]) -> list[Packed]:
    """Undo `stack_with_padding`. The results are bit-identical to the weights that were stacked.

    Args:
        stack: in the layout on disk.
        specs: of the weights that were stacked, in order.
    """
    form = get_format(stack.spec.format)
    parts, positions = [], dict.fromkeys(stack.tensors, 0)
    for weight_spec in specs:
        shapes, tensors = form.shapes(weight_spec), {}
        for spec in form.specs(weight_spec):
            name, dim, shared = spec.name, spec.split_n or 0, int(_holds_offsets(spec))
            length = shapes[name][dim]
            tensor = stack.tensors[name].narrow(dim, positions[name], length)
            positions[name] += length - shared  # the last offset of a weight is the first of the next
            # Views would keep the whole stack in memory.
            tensors[name] = tensor - tensor[0] if shared else tensor.clone(memory_format=torch.contiguous_format)
        parts.append(Packed(weight_spec, tensors))
    return parts


def _holds_offsets(spec: TensorSpec) -> bool:
    return spec.shape[0].endswith("+1")


def _identity(packed: Packed) -> tuple[object, ...]:
    """Return the fields that must be equal in every format: all but N and the params.

    Without `Format.stack`, the params that do not count rows must be equal, too.
    """
    spec = packed.spec
    return spec.format, spec.version, spec.pattern, spec.dtype, spec.shape[1]

"""Storing layers in the very numbers that another tool rounded them to: ``prune=none`` on a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.compress import Choice, Recipe
from semisparse.errors import InputError
from semisparse.formats import Packed, registry
from semisparse.integrations.importers import Grid
from semisparse.integrations.names import stored_keys
from semisparse.nn import is_linear, weight_of
from semisparse.patterns import NO_ZEROS, Group, parse_pattern
from semisparse.quant.group import KINDS, GroupScales

KEEP = "keep"
"""The value of the recipe key ``quant`` that stores each layer as it was rounded."""

SIZES = (128, 64, 32, 16, 8, 4)
"""Columns per group, largest first."""


@dataclass(frozen=True)
class Kept:
    """How a layer is stored in the numbers that it was rounded to.

    Args:
        choice: pattern, bits and format.
        scales: [N] float32 per row, or scales and zero points per group; a pack option.
    """

    choice: Choice
    scales: Tensor | GroupScales


def grids_of_modules(model: PreTrainedModel, grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """Return grids by module name.

    Args:
        model: experts apart, as it will be compressed.
        grids: by the layers' names in the source's files.
    """
    names = [f"{name}.weight" for name, module in model.named_modules() if is_linear(module)]
    stored = stored_keys(model, names)
    layers = {name.removesuffix(".weight"): stored[name].removesuffix(".weight") for name in names}
    return {name: grids[layer] for name, layer in layers.items() if layer in grids}


def leave_unrounded_dense(plan: Recipe, model: PreTrainedModel, grids: Mapping[str, Grid]) -> Recipe:
    """Return a recipe with ``quant=keep`` that ignores the layers which were not rounded; another recipe as it is.

    Raises:
        InputError: no layer was rounded.
    """
    if plan.quant != KEEP:
        return plan
    if not grids:
        raise InputError("quant=keep stores a model as another tool rounded it, but no layer of this one is rounded")
    dense = [name for name, module in model.named_modules() if is_linear(module) and name not in grids]
    return replace(plan, ignore=(*plan.ignore, *dense))


def kept_layers(model: PreTrainedModel, grids: Mapping[str, Grid], plan: Recipe) -> dict[str, Kept]:
    """Return how the layers with a grid are stored, by module name; none unless the recipe keeps rounded weights.

    Raises:
        InputError: the recipe rounds to other numbers than a layer has, or no format stores them; names the layer.
    """
    if plan.prune != "none" or plan.quant == "none":
        return {}
    kept = {}
    for name, grid in grids.items():
        try:
            kept[name] = _kept(grid, weight_of(model.get_submodule(name)), plan)
        except InputError as error:
            raise InputError(f"layer {name} cannot be stored as it was rounded: {error}") from error
    return kept


def require_same(name: str, packed: Packed, weight: Tensor) -> None:
    """Refuse a packed weight that is not, bit for bit, the one that the source's numbers stand for.

    Raises:
        InputError: a weight differs; names the first.
    """
    different = packed.unpack() != weight
    if different.any():
        row, column = different.nonzero()[0].tolist()
        raise InputError(
            f"layer {name} cannot be stored as it was rounded: format {packed.spec.format} would make "
            f"{packed.unpack()[row, column].item():.6g} of {weight[row, column].item():.6g} at row {row}, column "
            f"{column}; set quant=none to store 16 bits, or prune=magnitude to round anew"
        )


def _kept(grid: Grid, weight: Tensor, plan: Recipe) -> Kept:
    """Return how a layer is stored.

    Raises:
        InputError: no format stores its numbers, or the recipe asks for others.
    """
    quant = _quant_of(grid, weight)
    if plan.quant not in (KEEP, quant):
        raise InputError(
            f"its numbers are those of quant={quant}, the recipe says {plan.quant}; set quant=keep, or prune=magnitude "
            "to round anew"
        )
    if quant not in KINDS:
        scale = grid.scale.float().expand(len(weight), -1)[:, 0]
        return Kept(
            Choice(plan.pattern, quant, _format_of(plan, quant, plan.pattern)), scale.masked_fill(scale == 0, 1)
        )
    pattern = _pattern_of(grid, weight.shape[1], plan)
    scales = _group_scales(grid, weight, KINDS[quant], parse_pattern(pattern).step)
    return Kept(Choice(pattern, quant, _format_of(plan, quant, pattern)), scales)


def _quant_of(grid: Grid, weight: Tensor) -> str:
    """Return the value of the recipe key ``quant`` that stores a grid's numbers."""
    (rows, columns), (n, k) = grid.tile, weight.shape
    if grid.index is not None:
        raise InputError("the columns of its groups are not adjacent (desc_act, actorder); set quant=none")
    if rows not in (1, n):
        raise InputError(f"it has a scale per tile of {rows} x {columns}; set quant=none")
    by_row = columns >= k
    if grid.fp8:
        if not by_row or not grid.rounds_x:
            raise InputError(
                "fp8 is stored with a scale per row or for all, and x is rounded to fp8, too; set quant=none"
            )
        return "fp8"
    centred = grid.zero is None or bool((grid.zero == 128).all())
    if grid.bits == 8 and by_row and centred and grid.rounds_x:
        return "int8"
    bits = min(bits for bits in KINDS.values() if bits >= grid.bits)
    return "w4a8" if bits == 4 and grid.rounds_x else f"w{bits}"


def _pattern_of(grid: Grid, k: int, plan: Recipe) -> str:
    """Return the recipe's pattern if it has groups, else the largest groups that lie within the grid's."""
    columns = grid.tile[1]
    if plan.pattern != NO_ZEROS:
        pattern = parse_pattern(plan.pattern)
        if not isinstance(pattern, Group) or (columns < k and columns % pattern.step):
            raise InputError(
                f"its groups have {columns} columns, the recipe's pattern is {plan.pattern}; set pattern=0%"
            )
        return plan.pattern
    sizes = [size for size in SIZES if columns >= k or columns % size == 0]
    if not sizes:
        raise InputError(f"its groups have {columns} columns, expected a multiple of {SIZES[-1]}; set quant=none")
    return str(Group(sizes[0], 0))


def _format_of(plan: Recipe, quant: str, pattern: str) -> str:
    """Return the recipe's format, or the first that stores these numbers."""
    formats = [
        form.name
        for form in registry().values()
        if {"kind": quant} in form.variants and form.accepts(parse_pattern(pattern)) is None
    ]
    if plan.format != "auto" and plan.format not in formats:
        raise InputError(f"format {plan.format} does not store quant={quant}; set format={' or '.join(formats)}")
    return formats[0] if plan.format == "auto" else plan.format


def _group_scales(grid: Grid, weight: Tensor, bits: int, size: int) -> GroupScales:
    """Return a grid's scales and zero points for groups of ``size`` columns within its own.

    Raises:
        InputError: the weight's dtype does not hold the scales.
    """
    (n, k), columns = weight.shape, grid.tile[1]
    groups = torch.arange(-(-k // size)) * size // columns
    scale = grid.scale.expand(n, -1)[:, groups]
    rounded = scale.to(weight.dtype)
    if not torch.equal(rounded.float(), scale.float()):
        names = (str(dtype).removeprefix("torch.") for dtype in (scale.dtype, weight.dtype))
        raise InputError(
            "its scales are {}, which the model's dtype {} does not hold; set dtype in config.json".format(*names)
        )
    # A zero scale stands for zeros, as any scale does whose codes are all the zero point.
    rounded = rounded.masked_fill(rounded == 0, 1)
    zero = torch.full_like(grid.scale, 128.0, dtype=torch.float32) if grid.zero is None else grid.zero.float()
    return GroupScales(bits, size, rounded, zero.expand(n, -1)[:, groups] * 2 ** (8 - bits))

"""Store a checkpoint that another tool quantised with its own codes, scales and zero points (``prune=none``).

The "numbers" of a layer are these codes, scales and zero points; `Rounded` holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from semisparse.api.packing import pack_for_disk
from semisparse.api.recipe import formats_of, pack_options
from semisparse.compress import Choice, Recipe
from semisparse.errors import InputError, SemisparseError
from semisparse.formats.base import Codes, Packed
from semisparse.integrations.importers import Rounded
from semisparse.integrations.names import stored_keys
from semisparse.nn import is_linear, weight_of
from semisparse.patterns import NO_ZEROS, Group, parse_pattern
from semisparse.quant.group import KINDS
from semisparse.quant.symmetric import DTYPES

KEEP = "keep"
"""The value of the recipe key ``quant`` that stores each layer as it was rounded."""

SIZES = (128, 64, 32, 16, 8, 4)
"""The numbers of columns that a stored group may have, largest first."""

CENTRE = 128
"""Added to int8 values to make them unsigned codes."""


@dataclass(frozen=True)
class Kept:
    """A layer that is stored with the numbers that it has.

    Args:
        choice: pattern, bits and format.
        rounded: the numbers.
    """

    choice: Choice
    rounded: Rounded


def rounded_modules(model: PreTrainedModel, rounded: Mapping[str, Rounded]) -> dict[str, Rounded]:
    """Return rounded weights by module name.

    Args:
        model: as it will be compressed, with a linear layer for each expert.
        rounded: by the layers' names in the source's files.
    """
    return (
        {name: rounded[layer] for name, layer in _stored_layers(model).items() if layer in rounded} if rounded else {}
    )


def _stored_layers(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of linear layers in the files, by module name."""
    names = [f"{name}.weight" for name, module in model.named_modules() if is_linear(module)]
    stored = stored_keys(model, names)
    return {name.removesuffix(".weight"): stored[name].removesuffix(".weight") for name in names}


def leave_unrounded_dense(
    plan: Recipe, model: PreTrainedModel, rounded: Mapping[str, Rounded], stored: Collection[str]
) -> Recipe:
    """Return a recipe with ``quant=keep`` that ignores the layers which were not rounded; return others unchanged.

    Args:
        plan: the recipe.
        model: as it will be compressed, with a linear layer for each expert.
        rounded: by module name.
        stored: names of all rounded layers in the source's files.
    Raises:
        InputError: no layer was rounded, or the model has no linear layer for one that was; names it.
    """
    if not _keeps(plan):
        return plan
    if len(rounded) < len(stored):
        names = _stored_layers(model)
        lost = min(set(stored) - {names[name] for name in rounded})
        raise _refusal(lost, "the model holds it fused with others, as experts are; set quant=none")
    if plan.quant != KEEP:
        return plan
    if not stored:
        raise InputError("quant=keep stores a model as another tool rounded it, but no layer of this one is rounded")
    dense = [name for name, module in model.named_modules() if is_linear(module) and name not in rounded]
    return replace(plan, ignore=(*plan.ignore, *dense))


def kept_layers(model: PreTrainedModel, rounded: Mapping[str, Rounded], plan: Recipe) -> dict[str, Kept]:
    """Return the layers that are stored as they were rounded, by module name; none if the recipe says otherwise.

    Raises:
        InputError: the recipe rounds to other numbers than a layer has, or no format stores them; names the layer.
    """
    if not _keeps(plan):
        return {}
    kept = {}
    for name, numbers in rounded.items():
        try:
            kept[name] = Kept(_choice(numbers, weight_of(model.get_submodule(name)), plan), numbers)
        except InputError as error:
            raise _refusal(name, error) from error
    return kept


def pack_kept(name: str, kept: Kept, weight: Tensor, plan: Recipe) -> Packed:
    """Pack a layer with the numbers that it has.

    Args:
        name: the module's name.
        kept: the numbers, and the format that stores them.
        weight: [N, K], the dequantised weight.
        plan: its pack options.
    Raises:
        InputError: the format cannot store the numbers, or dequantises them to another weight; names the layer.
    """
    choice = kept.choice
    try:
        codes = _row_codes(kept.rounded, weight) if choice.quant in DTYPES else _group_codes(kept, weight)
        packed = pack_for_disk(weight, choice.format, choice.pattern, **pack_options(plan, choice.quant), codes=codes)
    except SemisparseError as error:
        raise _refusal(name, error) from error
    unpacked = packed.unpack()
    if not torch.equal(unpacked, weight):
        row, column = (unpacked != weight).nonzero()[0].tolist()
        raise _refusal(
            name,
            f"format {choice.format} would store {unpacked[row, column]:.6g}, expected {weight[row, column]:.6g}, at "
            f"row {row}, column {column}; set quant=none to store 16 bits",
        )
    return packed


def _keeps(plan: Recipe) -> bool:
    return plan.prune == "none" and plan.quant != "none"


def _refusal(name: str, reason: object) -> InputError:
    return InputError(f"layer {name} cannot be stored as it was rounded: {reason}")


def _choice(rounded: Rounded, weight: Tensor, plan: Recipe) -> Choice:
    """Return how a layer is stored.

    Raises:
        InputError: no format stores its numbers, or the recipe asks for others.
    """
    quant = _quant_of(rounded, weight)
    if plan.quant not in (KEEP, quant):
        raise InputError(
            f"its numbers are those of quant={quant}, the recipe says {plan.quant}; set quant=keep, or prune=magnitude "
            "to round anew"
        )
    pattern = _pattern_of(rounded, weight.shape[1], plan) if quant in KINDS else plan.pattern
    formats = formats_of(quant, parse_pattern(pattern))
    if plan.format == "auto":
        return Choice(pattern, quant, formats[0])
    if plan.format not in formats:
        raise InputError(f"format {plan.format} does not store quant={quant}; set format={' or '.join(formats)}")
    return Choice(pattern, quant, plan.format)


def _quant_of(rounded: Rounded, weight: Tensor) -> str:
    """Return the value of the recipe key ``quant`` that stores a layer's numbers.

    A kind that quantises x is returned only if the other tool's kernels quantise x, too.
    """
    (rows, columns), (n, k) = rounded.tile, weight.shape
    if rounded.index is not None:
        raise InputError("the columns of its groups are not adjacent (desc_act, actorder); set quant=none")
    if rows not in (1, n):
        raise InputError(f"it has a scale per tile of {rows} x {columns}; set quant=none")
    by_row = columns >= k
    if rounded.values.dtype == DTYPES["fp8"]:
        if not by_row or not rounded.rounds_x:
            raise InputError(
                "fp8 needs a scale per row or per weight, and activations that are quantised to fp8; set quant=none"
            )
        return "fp8"
    centred = rounded.zero is None or bool((rounded.zero == CENTRE).all())
    if rounded.bits == 8 and by_row and centred and rounded.rounds_x:
        return "int8"
    bits = min(bits for bits in KINDS.values() if bits >= rounded.bits)
    return "w4a8" if bits == 4 and rounded.rounds_x else f"w{bits}"


def _pattern_of(rounded: Rounded, k: int, plan: Recipe) -> str:
    """Return the recipe's pattern if it has groups, else that of the largest groups that divide the layer's groups."""
    columns = rounded.tile[1]
    if plan.pattern != NO_ZEROS:
        pattern = parse_pattern(plan.pattern)
        if not isinstance(pattern, Group) or (columns < k and columns % pattern.step):
            raise InputError(
                f"its groups have {columns} columns, the recipe's pattern is {plan.pattern}; "
                "set pattern=0% and quant=keep"
            )
        return plan.pattern
    sizes = [size for size in SIZES if columns >= k or columns % size == 0]
    if not sizes:
        raise InputError(f"its groups have {columns} columns, expected a multiple of {SIZES[-1]}; set quant=none")
    return str(Group(sizes[0], 0))


def _row_codes(rounded: Rounded, weight: Tensor) -> Codes:
    """Return 8-bit values with a scale per row."""
    values, scale = rounded.values, rounded.scale.float().expand(len(weight), 1)
    if rounded.zero is not None:
        values = (values.to(torch.int16) - CENTRE).to(torch.int8)
    return Codes(8, values, scale, None, weight.shape[1], rounds_x=True)


def _group_codes(kept: Kept, weight: Tensor) -> Codes:
    """Return unsigned codes with scales and zero points per group of the chosen pattern.

    Raises:
        InputError: the weight's dtype does not hold the scales.
    """
    rounded, (n, k) = kept.rounded, weight.shape
    size = parse_pattern(kept.choice.pattern).step
    values, zero = rounded.values, rounded.zero
    if zero is None:
        values, zero = (values.to(torch.int16) + CENTRE).to(torch.uint8), torch.full_like(rounded.scale, CENTRE)
    tiles = torch.arange(-(-k // size)) * size // rounded.tile[1]
    scale = rounded.scale.to(weight.dtype)
    if not torch.equal(scale.float(), rounded.scale.float()):
        stored, held = (str(dtype).removeprefix("torch.") for dtype in (rounded.scale.dtype, weight.dtype))
        raise InputError(
            f"its scales are {stored}, which the model's dtype {held} does not hold; "
            f"set dtype to {stored} in config.json"
        )
    scale = scale.masked_fill(scale == 0, 1)  # of a group of zeros, which is not stored
    scale, zero = (each.expand(n, -1)[:, tiles] for each in (scale, zero.float()))
    return Codes(KINDS[kept.choice.quant], values, scale, zero, size, kept.choice.quant.endswith("a8"))

"""Reading recipes by name or from a file, and checking them against their format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisparse.compress import NEEDS_DENSE, Recipe, parse_settings, read_yaml
from semisparse.errors import RecipeError
from semisparse.formats import registry
from semisparse.formats.base import format_names, get_format
from semisparse.patterns import NO_ZEROS, Pattern, parse_pattern
from semisparse.quant.group import KINDS as GROUP_KINDS

DENSE_GROUPS = "g128@0%"
"""The pattern of dense low-bit weights, unless a recipe names another."""

AUTO: Mapping[str, Any] = {"pattern": "0%", "prune": "sparsegpt", "search": "joint", "tune": "bqpo"}
"""The recipe ``auto``: each layer's pattern, bits and format are chosen such that the targets hold."""

KEEP: Mapping[str, Any] = {"pattern": "0%", "prune": "none", "quant": "keep"}
"""The recipe ``keep``: store a model that another tool quantised with the quantised values that it has."""


def recipes() -> dict[str, Mapping[str, Any]]:
    """Return the built-in recipes by name: those that the formats declare, ``auto`` and ``keep``."""
    declared = {name: settings for form in registry().values() for name, settings in form.recipes.items()}
    return {**declared, "auto": AUTO, "keep": KEEP}


def read_recipe(
    recipe: str | Path | Recipe, settings: Sequence[str] = (), targets: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe by name or from a YAML file, and apply settings to it.

    Args:
        recipe: a `Recipe`, a built-in recipe's name or a YAML file.
        settings: changes to the recipe, ``key=value`` each.
        targets: of ``search=joint``, such as ``{"bits": 3.0}``.
    Raises:
        RecipeError: a name, key or value is unknown (lists the known ones), or the format cannot store the pattern or
            the quantisation.
    """
    changes = parse_settings(settings) | ({"targets": targets} if targets else {})
    if isinstance(recipe, Recipe):
        result = recipe.with_changes(changes, _format_keys({"format": recipe.format} | changes))
    else:
        values = _read_values(recipe)
        if changes.get("prune") == "none":  # drop the recipe's own stages that need the dense model, not the user's
            values = {key: value for key, value in values.items() if key not in NEEDS_DENSE}
        values = {**values, **changes}
        result = Recipe.read(_in_groups(values), _format_keys(values))
    if result.search == "joint":
        if result.quant != "none":
            raise RecipeError("search=joint chooses the bits of each layer; leave quant out")
        return result
    if result.format != "auto":
        reason = get_format(result.format).accepts(parse_pattern(result.pattern))
        if reason:
            raise RecipeError(f"format {result.format} cannot store pattern {result.pattern}: {reason}")
    if result.quant == "keep":  # which formats can store a layer is known once it is read
        return result
    formats = formats_of(result.quant, parse_pattern(result.pattern))
    if result.format not in formats and (result.quant != "none" or result.format != "auto"):
        advice = (
            f"set another quant or format={' or '.join(formats)}" if formats else "no format does: set another quant"
        )
        raise RecipeError(
            f"format {result.format} does not store quant={result.quant} of pattern {result.pattern}; {advice}"
        )
    return result


def formats_of(quant: str, pattern: Pattern) -> list[str]:
    """Return the names of the formats that store weights of a pattern quantised as the recipe key ``quant`` says."""
    variant = {} if quant == "none" else {"kind": quant}
    return [
        form.name
        for form in registry().values()
        if variant in form.variants and form.accepts(pattern) is None and (not variant or form.rounds(pattern))
    ]


def _in_groups(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the pattern ``0%`` by ``g128@0%`` (no group is dropped) if weights are quantised in groups."""
    if values.get("quant") not in tuple(GROUP_KINDS) or values.get("pattern") != NO_ZEROS:
        return values
    stores = formats_of(values["quant"], parse_pattern(DENSE_GROUPS))[0]
    return {"format": stores, **values, "pattern": DENSE_GROUPS}


def _read_values(recipe: str | Path) -> dict[str, Any]:
    """Return the keys and values of a built-in recipe or a YAML file."""
    if str(recipe) in recipes():
        return dict(recipes()[str(recipe)])
    try:
        is_file = Path(recipe).suffix in (".yaml", ".yml") or Path(recipe).is_file()
    except OSError:  # the name is too long for a file's
        is_file = False
    if is_file:
        return read_yaml(recipe)
    raise RecipeError(f"unknown recipe {str(recipe)[:99]!r}; known: {', '.join(sorted(recipes()))}, or a YAML file")


def _format_keys(values: Mapping[str, Any]) -> Mapping[str, Sequence[str | int]]:
    """Return the recipe keys that the recipe's format adds (`Format.options`)."""
    name = values.get("format", "auto")
    return get_format(name).options if name in format_names() else {}


def pack_options(plan: Recipe, quant: str) -> dict[str, Any]:
    """Return the pack options that a recipe sets, for a layer that is quantised as ``quant`` says."""
    return dict(plan.options) | ({} if quant == "none" else {"kind": quant})


def can_store(plan: Recipe, pattern: Pattern) -> bool:
    """Return whether a recipe's format stores a pattern."""
    return plan.format == "auto" or get_format(plan.format).accepts(pattern) is None

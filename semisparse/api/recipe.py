"""Reading recipes by name or from a file, and checking them against their format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from semisparse.compress import Recipe, parse_settings, read_yaml
from semisparse.errors import RecipeError
from semisparse.formats import registry
from semisparse.formats.base import format_names, get_format
from semisparse.patterns import Pattern, parse_pattern


def recipes() -> dict[str, Mapping[str, Any]]:
    """Return the built-in recipes, which the formats declare, by name."""
    return {name: settings for form in registry().values() for name, settings in form.recipes.items()}


def read_recipe(recipe: str | Path | Recipe, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or from a YAML file, and apply settings to it.

    Args:
        recipe: a `Recipe`, a built-in recipe's name or a YAML file.
        settings: changes to the recipe, ``key=value`` each.
    Raises:
        RecipeError: a name, key or value is unknown (lists the known ones), or the format cannot store the pattern or
            the quantisation.
    """
    changes = parse_settings(settings)
    if isinstance(recipe, Recipe):
        result = recipe.with_changes(changes, _format_keys({"format": recipe.format} | changes))
    else:
        values = _read_values(recipe)
        format_keys = _format_keys(values | changes)
        result = Recipe.read(values, format_keys).with_changes(changes, format_keys)
    if result.format != "auto":
        reason = get_format(result.format).accepts(parse_pattern(result.pattern))
        if reason:
            raise RecipeError(f"format {result.format} cannot store pattern {result.pattern}: {reason}")
    variant = {} if result.quant == "none" else {"kind": result.quant}
    formats = [form.name for form in registry().values() if variant in form.variants]
    if result.format not in formats and (variant or result.format != "auto"):
        raise RecipeError(
            f"format {result.format} does not store quant={result.quant}; "
            f"set another one, or format={' or '.join(formats)}"
        )
    return result


def _read_values(recipe: str | Path) -> dict[str, Any]:
    """Return the keys and values of a built-in recipe or a YAML file."""
    if str(recipe) in recipes():
        return dict(recipes()[str(recipe)])
    if Path(recipe).suffix in (".yaml", ".yml") or Path(recipe).is_file():
        return read_yaml(recipe)
    raise RecipeError(f"unknown recipe {str(recipe)!r}; known: {', '.join(sorted(recipes()))}, or a YAML file")


def _format_keys(values: Mapping[str, Any]) -> Mapping[str, Sequence[str | int]]:
    """Return the recipe keys that the recipe's format adds (`Format.options`)."""
    name = values.get("format", "auto")
    return get_format(name).options if name in format_names() else {}


def pack_options(plan: Recipe) -> dict[str, str | int]:
    """Return the pack options that a recipe sets."""
    return dict(plan.options) | ({} if plan.quant == "none" else {"kind": plan.quant})


def can_store(plan: Recipe, pattern: Pattern) -> bool:
    """Return whether a recipe's format stores a pattern."""
    return plan.format == "auto" or get_format(plan.format).accepts(pattern) is None

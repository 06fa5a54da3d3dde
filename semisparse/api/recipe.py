"""Recipes by name or from a file, checked against the format that they end in."""

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
    """Give the built-in recipes, which the formats declare, by name."""
    return {name: settings for form in registry().values() for name, settings in form.recipes.items()}


def read_recipe(recipe: str | Path | Recipe, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or from a YAML file, and vary it.

    Args:
        recipe: a built-in recipe's name or a YAML file.
        settings: ``key=value`` each.
    Raises:
        RecipeError: unknown name, key or value; lists the known ones.
    """
    changes = parse_settings(settings)
    if isinstance(recipe, Recipe):
        found = recipe.with_changes(changes, _own_keys({"format": recipe.format} | changes))
    else:
        written = _written(recipe)
        own = _own_keys(written | changes)
        found = Recipe.read(written, own).with_changes(changes, own)
    if found.format != "auto":
        reason = get_format(found.format).accepts(parse_pattern(found.pattern))
        if reason:
            raise RecipeError(f"format {found.format} cannot store pattern {found.pattern}: {reason}")
    rounding = {} if found.quant == "none" else {"kind": found.quant}
    able = [form.name for form in registry().values() if rounding in form.variants]
    if found.format not in able and (rounding or found.format != "auto"):
        raise RecipeError(
            f"format {found.format} does not store quant={found.quant}; set another one, or format={' or '.join(able)}"
        )
    return found


def _written(recipe: str | Path) -> dict[str, Any]:
    """Return the keys and values of a recipe by name, or of a YAML file."""
    if str(recipe) in recipes():
        return dict(recipes()[str(recipe)])
    if Path(recipe).suffix in (".yaml", ".yml") or Path(recipe).is_file():
        return read_yaml(recipe)
    raise RecipeError(f"unknown recipe {str(recipe)!r}; known: {', '.join(sorted(recipes()))}, or a YAML file")


def _own_keys(written: Mapping[str, Any]) -> Mapping[str, Sequence[str | int]]:
    """Return the keys that a recipe's format adds."""
    name = written.get("format", "auto")
    return get_format(name).options if name in format_names() else {}


def pack_options(plan: Recipe) -> dict[str, str | int]:
    """Return the options that a recipe's format packs with."""
    return dict(plan.options) | ({} if plan.quant == "none" else {"kind": plan.quant})


def can_store(plan: Recipe, pattern: Pattern) -> bool:
    """Say whether a recipe's format stores a pattern."""
    return plan.format == "auto" or get_format(plan.format).accepts(pattern) is None

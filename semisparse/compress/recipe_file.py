"""A recipe's keys and values as text: settings ``key=value``, and YAML files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from semisparse.errors import RecipeError

MAX_YAML_BYTES = 1 << 16
"""Maximum size of a recipe file, in bytes."""


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse settings ``key=value``; a value is text, or a YAML list or mapping in brackets.

    Raises:
        RecipeError: a setting has another form.
    """
    changes = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"setting {setting!r} is not written key=value")
        # Other values are not parsed as YAML: *.mlp.experts would be an alias.
        brackets = value.lstrip()[:1] in ("[", "{")
        changes[key.strip()] = _parse_yaml(value, f"setting {setting!r}") if brackets else value.strip()
    return changes


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a recipe's keys and values from a YAML file.

    Raises:
        RecipeError: the file cannot be read, is too large, or is not a YAML mapping without aliases.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    if len(content) > MAX_YAML_BYTES:
        raise RecipeError(f"the recipe {path} is larger than {MAX_YAML_BYTES} bytes")
    mapping = _parse_yaml(text, f"recipe {path}")
    if not isinstance(mapping, dict):
        raise RecipeError(f"recipe {path} holds no key: value lines")
    return mapping


class _PlainLoader(yaml.BaseLoader):
    """YAML without aliases, with every scalar as text: in YAML 1.1 ``2:4`` is the base-60 number 124."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read; write a pattern that begins with * in quotes")
        return super().compose_node(parent, index)


def _parse_yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{what} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{what} is nested too deeply") from error

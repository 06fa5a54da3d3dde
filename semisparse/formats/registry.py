"""The formats by name: the subpackages of ``semisparse/formats``, each imported when it is first asked for."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from semisparse.errors import InputError

if TYPE_CHECKING:
    from semisparse.formats.base import Format


@cache
def format_names() -> tuple[str, ...]:
    """Return the names of the subpackages of ``semisparse/formats``; each declares its format as ``FORMAT``."""
    import semisparse.formats as package

    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg))


@cache
def get_format(name: str) -> Format:
    """Return a format by name. Only its folder is imported.

    Raises:
        InputError: there is none; lists the known ones.
    """
    if name not in format_names():
        raise InputError(f"unknown format {name!r}; known: {', '.join(format_names())}")
    declared: Format = importlib.import_module(f"semisparse.formats.{name}").FORMAT
    if declared.name != name:
        raise ImportError(f"formats/{name} declares a format named {declared.name}")
    return declared


def registry() -> dict[str, Format]:
    """Return every format by name."""
    return {name: get_format(name) for name in format_names()}

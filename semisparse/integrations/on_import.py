"""Registering with transformers when transformers is imported, so that ``import semisparse`` imports no torch."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TRIGGER = "transformers.modeling_utils"
"""The module of transformers that every model imports. It imports the registry of quantisation methods."""

REGISTRAR = "semisparse.integrations.transformers"
"""The module that registers the checkpoint format when it is imported."""


def register_with_transformers() -> None:
    """Register the checkpoint format now if `TRIGGER` is imported, else when it is. A second call changes nothing."""
    if TRIGGER in sys.modules:
        importlib.import_module(REGISTRAR)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `TRIGGER` as the other finders do, and wraps its loader so that `REGISTRAR` is imported after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with another loader, then imports `REGISTRAR`."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(REGISTRAR)

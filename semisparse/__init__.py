"""semisparse prunes, quantises and packs language models, and runs them faster and in less memory than dense ones.

Importing it registers the checkpoint format with transformers, now or as soon as transformers is imported. It imports
nothing heavy, initialises no CUDA and compiles nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from semisparse.errors import SemisparseError
from semisparse.integrations.on_import import register_with_transformers
from semisparse.lazy import lazy
from semisparse.version import __version__

if TYPE_CHECKING:
    from semisparse.api import CompressionReport, compress, export, linear, load, pack
    from semisparse.engine import Engine, Sampling
    from semisparse.nn import join_layers

register_with_transformers()

__all__ = [
    "CompressionReport",
    "Engine",
    "Sampling",
    "SemisparseError",
    "__version__",
    "compress",
    "export",
    "join_layers",
    "linear",
    "load",
    "pack",
]

HOMES = {
    **dict.fromkeys(("CompressionReport", "export", "linear", "load", "pack"), "semisparse.api"),
    **dict.fromkeys(("Engine", "Sampling"), "semisparse.engine"),
    "join_layers": "semisparse.nn",
}
"""The modules of the public names, which are imported when a name is first used."""


__getattr__, __dir__ = lazy(__name__, HOMES)


class _Package(ModuleType):
    """This package. ``compress`` stays the function even after the subpackage of that name has been imported."""

    @property
    def compress(self) -> Any:
        return importlib.import_module("semisparse.api").compress

    @compress.setter
    def compress(self, subpackage: ModuleType) -> None:
        """Do nothing: the import system would set the name to the subpackage."""


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package

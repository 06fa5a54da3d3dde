"""The Python entry points. They run compression algorithms and pack the results into formats.

Names are imported when they are first used: `inspect` needs no compression, and importing all of it takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semisparse.lazy import lazy

if TYPE_CHECKING:
    from semisparse.api.availability import list_formats
    from semisparse.api.compression import compress
    from semisparse.api.exporting import export
    from semisparse.api.inspecting import inspect_directory
    from semisparse.api.loading import load
    from semisparse.api.measuring import evaluate
    from semisparse.api.packing import pack
    from semisparse.api.recipe import read_recipe, recipes
    from semisparse.api.report import CompressionReport
    from semisparse.api.targets import parse_targets
    from semisparse.checkpoint import load_tokenizer, pick_device
    from semisparse.compress import joined_ranks
    from semisparse.formats import linear

__all__ = [
    "CompressionReport",
    "compress",
    "evaluate",
    "export",
    "inspect_directory",
    "joined_ranks",
    "linear",
    "list_formats",
    "load",
    "load_tokenizer",
    "pack",
    "parse_targets",
    "pick_device",
    "read_recipe",
    "recipes",
]

HOMES = {
    **dict.fromkeys(("read_recipe", "recipes"), "semisparse.api.recipe"),
    **dict.fromkeys(("load_tokenizer", "pick_device"), "semisparse.checkpoint"),
    "CompressionReport": "semisparse.api.report",
    "compress": "semisparse.api.compression",
    "evaluate": "semisparse.api.measuring",
    "export": "semisparse.api.exporting",
    "inspect_directory": "semisparse.api.inspecting",
    "joined_ranks": "semisparse.compress",
    "linear": "semisparse.formats",
    "list_formats": "semisparse.api.availability",
    "load": "semisparse.api.loading",
    "pack": "semisparse.api.packing",
    "parse_targets": "semisparse.api.targets",
}
"""The module of each name."""

__getattr__, __dir__ = lazy(__name__, HOMES)

"""The Python entry points. They run compression algorithms and pack the results into formats."""

from semisparse.api.availability import list_formats
from semisparse.api.compression import CompressionReport, compress
from semisparse.api.exporting import export
from semisparse.api.inspecting import inspect_directory
from semisparse.api.loading import load
from semisparse.api.measuring import evaluate
from semisparse.api.packing import pack
from semisparse.api.recipe import read_recipe, recipes
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

"""The Python entry points, where compression meets formats."""

from semisparse.api.availability import list_formats
from semisparse.api.compression import CompressionReport, compress
from semisparse.api.inspecting import inspect_directory
from semisparse.api.measuring import evaluate, generate
from semisparse.api.packing import pack
from semisparse.api.recipe import read_recipe, recipes
from semisparse.formats import linear
from semisparse.integrations.loading import load, load_tokenizer

__all__ = [
    "CompressionReport",
    "compress",
    "evaluate",
    "generate",
    "inspect_directory",
    "linear",
    "list_formats",
    "load",
    "load_tokenizer",
    "pack",
    "read_recipe",
    "recipes",
]

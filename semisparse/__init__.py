"""semisparse makes sparse language models pay: prune, pack and run them faster and smaller than dense.

Importing it registers the checkpoint format with transformers; it initialises no CUDA and compiles nothing.
"""

from semisparse.api import CompressionReport, compress, linear, load, pack
from semisparse.errors import SemisparseError
from semisparse.integrations.transformers import register
from semisparse.nn import join_layers
from semisparse.version import __version__

register()

__all__ = ["CompressionReport", "SemisparseError", "__version__", "compress", "join_layers", "linear", "load", "pack"]

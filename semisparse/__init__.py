"""semisparse makes sparse language models pay: prune, pack and run them faster and smaller than dense.

Importing it registers the checkpoint format with transformers; it initialises no CUDA and compiles nothing.
"""

from semisparse.errors import SemisparseError
from semisparse.formats import linear
from semisparse.integrations.transformers import register as _register

_register()

__all__ = ["SemisparseError", "linear"]

"""Running models: static cache, captured decode step, sampling, fused decoder layers; what generate and bench run."""

from typing import TYPE_CHECKING

from semisparse.engine.engine import Engine
from semisparse.engine.generation import Generation
from semisparse.engine.sampling import Sampling
from semisparse.lazy import lazy

if TYPE_CHECKING:
    from semisparse.checkpoint import is_encoder, read_config

__all__ = ["Engine", "Generation", "Sampling", "is_encoder", "read_config"]

# They import model classes of transformers, which takes seconds.
__getattr__, __dir__ = lazy(__name__, dict.fromkeys(("is_encoder", "read_config"), "semisparse.checkpoint"))

"""Running models: static cache, captured decode step, sampling, fused decoder layers; what generate and bench run."""

from semisparse.checkpoint import is_encoder, read_config
from semisparse.engine.engine import Engine, Generation
from semisparse.engine.sampling import Sampling

__all__ = ["Engine", "Generation", "Sampling", "is_encoder", "read_config"]

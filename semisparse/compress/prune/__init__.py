"""Prune one linear layer's weight: magnitude, Wanda, and SparseGPT with improvements that need no training."""

from semisparse.compress.prune.layer import PrunedLayer, prune_kinds, prune_layer, prune_levels, require_finite
from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.statistics import RunningSums, Statistics

__all__ = [
    "PrunedLayer",
    "RunningSums",
    "Statistics",
    "magnitude",
    "prune_kinds",
    "prune_layer",
    "prune_levels",
    "require_finite",
]

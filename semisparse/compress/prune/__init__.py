"""Prune one layer's weight: magnitude, Wanda, SparseGPT and what improves on it without training."""

from semisparse.compress.prune.layer import PrunedLayer, prune_layer, prune_levels, require_finite
from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.statistics import RunningSums, Statistics

__all__ = ["PrunedLayer", "RunningSums", "Statistics", "magnitude", "prune_layer", "prune_levels", "require_finite"]

"""Prune one linear layer's weight: magnitude, Wanda, and SparseGPT with improvements that need no training."""

from semisparse.compress.prune.layer import (
    PrunedLayer,
    can_share_rows,
    prune_kinds,
    prune_layer,
    prune_levels,
    require_finite,
)
from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.rows import Rows, piece_lengths
from semisparse.compress.prune.statistics import RunningSums, Statistics

__all__ = [
    "PrunedLayer",
    "Rows",
    "RunningSums",
    "Statistics",
    "can_share_rows",
    "magnitude",
    "piece_lengths",
    "prune_kinds",
    "prune_layer",
    "prune_levels",
    "require_finite",
]

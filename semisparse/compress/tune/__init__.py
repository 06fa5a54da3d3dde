"""Train what is left of a pruned model on the calibration text: block by block."""

from semisparse.compress.tune.block import tune_block
from semisparse.compress.tune.training import Trained, cut_for_steps

__all__ = ["Trained", "cut_for_steps", "tune_block"]

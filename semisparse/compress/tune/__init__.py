"""Train what is left of a pruned model on the calibration text: block by block, then its scales end to end."""

from semisparse.compress.tune.block import tune_block
from semisparse.compress.tune.end_to_end import tune_end_to_end
from semisparse.compress.tune.training import Trained, cut_for_steps

__all__ = ["Trained", "cut_for_steps", "tune_block", "tune_end_to_end"]

"""Train the kept weights one decoder layer at a time (BQPO), then scales and zero points, or all, end to end."""

from semisparse.compress.tune.bqpo import submodules_of, tune_decoder_layer, tune_submodules
from semisparse.compress.tune.distil import distil
from semisparse.compress.tune.end_to_end import tune_end_to_end
from semisparse.compress.tune.predictions import dense_predictions
from semisparse.compress.tune.training import TuningResult, split_for_steps

__all__ = [
    "TuningResult",
    "dense_predictions",
    "distil",
    "split_for_steps",
    "submodules_of",
    "tune_decoder_layer",
    "tune_end_to_end",
    "tune_submodules",
]

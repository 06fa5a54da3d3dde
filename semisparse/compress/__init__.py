"""Turn a dense model into one whose weights obey a pattern: recipes, calibration, pruning, search and tuning."""

from semisparse.compress.calibration import NEEDS_CALIBRATION, calibration_batches, calibration_tokens, warn_if_fewer
from semisparse.compress.choice import Choice, Option
from semisparse.compress.distributed.ranks import Ranks, all_ranks
from semisparse.compress.distributed.watch import joined_ranks
from semisparse.compress.journal import Journal, SharedJournal, fingerprint, open_journal, weights_digest
from semisparse.compress.pipeline import compress_decoder_layers
from semisparse.compress.recipe import NEEDS_DENSE, Recipe
from semisparse.compress.recipe_file import parse_settings, read_yaml
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.staying_dense import dense_layers, split_decoder_experts
from semisparse.compress.store import FinishedLayer, InPlace, LayerStore
from semisparse.compress.tune import TuningResult

__all__ = [
    "NEEDS_CALIBRATION",
    "NEEDS_DENSE",
    "Choice",
    "FinishedLayer",
    "InPlace",
    "Journal",
    "LayerReport",
    "LayerStore",
    "Option",
    "Progress",
    "Ranks",
    "Recipe",
    "SharedJournal",
    "TuningResult",
    "all_ranks",
    "calibration_batches",
    "calibration_tokens",
    "compress_decoder_layers",
    "dense_layers",
    "fingerprint",
    "joined_ranks",
    "open_journal",
    "parse_settings",
    "read_yaml",
    "split_decoder_experts",
    "warn_if_fewer",
    "weights_digest",
]

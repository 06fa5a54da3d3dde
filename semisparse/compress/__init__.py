"""Turn a dense model into one whose weights obey a pattern: recipes, calibration, pruning block by block."""

from semisparse.compress.calibration import calibration_batches
from semisparse.compress.journal import Journal, fingerprint
from semisparse.compress.pipeline import compress_blocks
from semisparse.compress.recipe import Recipe, parse_settings, read_yaml
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.tune import Trained

__all__ = [
    "Journal",
    "LayerReport",
    "Progress",
    "Recipe",
    "Trained",
    "calibration_batches",
    "compress_blocks",
    "fingerprint",
    "parse_settings",
    "read_yaml",
]

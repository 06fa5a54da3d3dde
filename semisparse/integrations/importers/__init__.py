"""Reading checkpoints that other tools quantised, one file per format; `reading` loads a whole directory."""

from semisparse.integrations.importers.method import Rounded
from semisparse.integrations.importers.reading import METHODS, load_dequantised, quantised_elsewhere

__all__ = ["METHODS", "Rounded", "load_dequantised", "quantised_elsewhere"]

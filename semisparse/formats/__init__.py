"""Formats: one folder each, found by scanning this package."""

from semisparse.formats.base import Case, Format, Packed, TensorSpec, WeightSpec, get_format, registry
from semisparse.formats.kernel import Kernel, Pass, Problem
from semisparse.formats.product import linear

__all__ = [
    "Case",
    "Format",
    "Kernel",
    "Packed",
    "Pass",
    "Problem",
    "TensorSpec",
    "WeightSpec",
    "get_format",
    "linear",
    "registry",
]

"""SparseLinear, fused layers of several weights, replacing a model's modules, slicing and stacking packed weights."""

from semisparse.nn.dequantise import dequantise_layers
from semisparse.nn.joined import JoinedLinear, JoinedPart, join_layers
from semisparse.nn.replace import LINEAR_CLASSES, is_linear, replace_linear, swap_weight, weight_of
from semisparse.nn.slicing import concatenate_weights, slice_weight
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacked_linear import StackedLinear

__all__ = [
    "LINEAR_CLASSES",
    "JoinedLinear",
    "JoinedPart",
    "SparseLinear",
    "StackedLinear",
    "concatenate_weights",
    "dequantise_layers",
    "is_linear",
    "join_layers",
    "replace_linear",
    "slice_weight",
    "swap_weight",
    "weight_of",
]

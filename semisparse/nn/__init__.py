"""SparseLinear, replacing the modules of a model, and the parts of a layer that ranks and fused layers hold."""

from semisparse.nn.joined import JoinedLinear, JoinedPart, join_layers
from semisparse.nn.parts import cut, join, stacked
from semisparse.nn.replace import is_linear, replace_linear, swap_weight, weight_of
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacked import StackedLinear

__all__ = [
    "JoinedLinear",
    "JoinedPart",
    "SparseLinear",
    "StackedLinear",
    "cut",
    "is_linear",
    "join",
    "join_layers",
    "replace_linear",
    "stacked",
    "swap_weight",
    "weight_of",
]

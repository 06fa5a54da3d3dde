"""SparseLinear, and replacing the modules of a model."""

from semisparse.nn.replace import is_linear, replace_linear, swap_weight, weight_of
from semisparse.nn.sparse_linear import SparseLinear

__all__ = ["SparseLinear", "is_linear", "replace_linear", "swap_weight", "weight_of"]

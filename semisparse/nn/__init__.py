"""SparseLinear, experts, fused layers of several weights, replacing modules, slicing and stacking packed weights.

The names of dequantise.py and replace.py are imported when they are first used: those modules import transformers.
"""

from typing import TYPE_CHECKING

from semisparse.formats.product import (
    constant_linear,
    fused_product,
    permutation_of,
    permuted_linear,
    prepare_product,
    structure_of,
)
from semisparse.lazy import lazy
from semisparse.nn.dense_copy import CopiedLinear, copy_pays
from semisparse.nn.joined import JoinedLinear, JoinedPart, join_layers
from semisparse.nn.joined_experts import JoinedExperts, join_experts
from semisparse.nn.slicing import check_slice, concatenate_weights, slice_weight
from semisparse.nn.sparse_experts import SparseExperts, expert_shapes, is_fused_experts, prepare_experts, split_experts
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacked_linear import StackedLinear

if TYPE_CHECKING:
    from semisparse.nn.dequantise import dequantise_layers
    from semisparse.nn.replace import LINEAR_CLASSES, is_linear, replace_linear, swap_weight, weight_of

__all__ = [
    "LINEAR_CLASSES",
    "CopiedLinear",
    "JoinedExperts",
    "JoinedLinear",
    "JoinedPart",
    "SparseExperts",
    "SparseLinear",
    "StackedLinear",
    "check_slice",
    "concatenate_weights",
    "constant_linear",
    "copy_pays",
    "dequantise_layers",
    "expert_shapes",
    "fused_product",
    "is_fused_experts",
    "is_linear",
    "join_experts",
    "join_layers",
    "permutation_of",
    "permuted_linear",
    "prepare_experts",
    "prepare_product",
    "replace_linear",
    "slice_weight",
    "split_experts",
    "structure_of",
    "swap_weight",
    "weight_of",
]

REPLACING = ("LINEAR_CLASSES", "is_linear", "replace_linear", "swap_weight", "weight_of")

__getattr__, __dir__ = lazy(__name__, {"dequantise_layers": ".dequantise", **dict.fromkeys(REPLACING, ".replace")})

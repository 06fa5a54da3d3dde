"""The linear weights that a compression leaves dense, and why."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from semisparse.compress.decoder import decoder_layers
from semisparse.compress.recipe import Recipe
from semisparse.nn import LINEAR_CLASSES, is_linear, split_experts, weight_of

SMALLEST = 8
"""Linear layers with fewer rows or columns, such as gates, stay dense: they take few bytes and their errors matter."""

IGNORED = "ignored by the recipe"
OUTSIDE = "outside the decoder layers"
OWN_FORWARD = "does not compute x @ w.T + bias"
ROUTER = "router of the experts"
SMALL = f"fewer than {SMALLEST} rows or columns"


@dataclass(frozen=True)
class DenseLayer:
    """A weight that stays dense.

    Args:
        name: module name in the model.
        reason: why.
        bytes: of the weight.
    """

    name: str
    reason: str
    bytes: int


def is_ignored(recipe: Recipe, name: str) -> bool:
    """Return whether the recipe's `ignore` names a module, or all that is inside it."""
    return any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.*", glob) for glob in recipe.ignore)


def warn_if_unmatched(model: nn.Module, recipe: Recipe) -> None:
    """Warn of each pattern of the recipe's `ignore` that names nothing in the model, after its experts were split."""
    names = [name for name, _ in model.named_modules()]
    for glob in recipe.ignore:
        if not any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.*", glob) for name in names):
            example = next((name for name, module in model.named_modules() if is_linear(module)), names[-1])
            warnings.warn(f"ignore: {glob!r} matches no layer of the model; an example is {example!r}", stacklevel=2)


def split_decoder_experts(model: nn.Module, recipe: Recipe) -> None:
    """Give the experts in a model's decoder layers linear layers of their own, unless they are ignored."""
    decoder_list = decoder_layers(model)[0]
    split_experts(model, keep=lambda name: is_ignored(recipe, name) or not name.startswith(f"{decoder_list}."))


def reason_to_stay_dense(model: nn.Module, name: str, recipe: Recipe) -> str | None:
    """Return why a module with a weight, inside a decoder layer, is not compressed; None if it is."""
    module = model.get_submodule(name)
    if is_ignored(recipe, name):
        return IGNORED
    if _is_router(model, name):
        return ROUTER
    if not is_linear(module):
        return OWN_FORWARD
    return SMALL if min(weight_of(module).shape) < SMALLEST else None


def dense_layers(model: nn.Module, recipe: Recipe, compressed: Collection[str]) -> list[DenseLayer]:
    """List the linear weights that stay dense: of linear layers and, in decoder layers, of routers and fused experts.

    Args:
        model: before its layers are replaced.
        recipe: its `ignore`.
        compressed: names of the layers that are compressed.
    """
    decoder_list = decoder_layers(model)[0]
    dense = []
    for name, module in model.named_modules():
        inside = name.startswith(f"{decoder_list}.")
        size = sum(parameter.nbytes for parameter in _linear_weights(module, inside))
        if size and name not in compressed:
            reason = (reason_to_stay_dense(model, name, recipe) or OWN_FORWARD) if inside else OUTSIDE
            dense.append(DenseLayer(name, reason, size))
    return dense


def _linear_weights(module: nn.Module, inside: bool) -> list[Tensor]:
    """Return a module's own linear weights; in a decoder layer those of any class but embeddings and convolutions."""
    if isinstance(module, LINEAR_CLASSES):
        return [weight_of(module)]
    if not inside or isinstance(module, nn.Embedding | _ConvNd):
        return []
    return [parameter for parameter in module.parameters(recurse=False) if matrix_dims(parameter) > 1]


def matrix_dims(parameter: Tensor) -> int:
    """Return how many of a parameter's dimensions are larger than 1."""
    return sum(size > 1 for size in parameter.shape)


def _is_router(model: nn.Module, name: str) -> bool:
    """Return whether a module has a weight with as many rows as a sibling module has experts."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return False
    rows = len(weight_of(module)) if isinstance(module, LINEAR_CLASSES) else len(weight)
    return any(rows == _experts(child) for child in parent.children() if child is not module)


def _experts(module: nn.Module) -> int:
    """Return how many experts a module holds, as children 0, 1, ... or in a fused weight; 0 if it has none.

    The weight of a convolution has three dimensions, too, and as many rows as the projection beside it.
    """
    if isinstance(module, _ConvNd):
        return 0
    fused = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return len(fused[0]) if fused else sum(name.isdecimal() for name, _ in module.named_children())

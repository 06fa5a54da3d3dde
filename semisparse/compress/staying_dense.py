"""The linear weights that a compression leaves dense, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from semisparse.compress.decoder import decoder_layers
from semisparse.compress.recipe import Recipe
from semisparse.nn import LINEAR_CLASSES, is_linear, weight_of

SMALLEST = 8
"""A linear layer of fewer rows or columns is a gate: it decides much and weighs nothing."""

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
    """Return whether the recipe's `ignore` names a module."""
    return any(fnmatchcase(name, glob) for glob in recipe.ignore)


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
    """List the linear weights that stay dense: of linear layers, and parameters of two or more dimensions elsewhere.

    Embeddings and convolutions are no linear weights.

    Args:
        model: before its layers are replaced.
        recipe: its `ignore`.
        compressed: names of the layers that are compressed.
    """
    decoder_list = decoder_layers(model)[0]
    found: dict[str, DenseLayer] = {}
    for owner, weight in _linear_weights(model):
        if owner not in compressed:
            inside = owner.startswith(f"{decoder_list}.")
            reason = (reason_to_stay_dense(model, owner, recipe) or OWN_FORWARD) if inside else OUTSIDE
            before = found[owner].bytes if owner in found else 0
            found[owner] = DenseLayer(owner, reason, before + weight.nbytes)
    return list(found.values())


def _linear_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | _ConvNd):
            continue
        for parameter in module.parameters(recurse=False):
            if matrix_dims(parameter) > 1 or (isinstance(module, LINEAR_CLASSES) and parameter.dim() > 1):
                yield name, parameter


def matrix_dims(parameter: Tensor) -> int:
    """Return how many of a parameter's dimensions are larger than 1."""
    return sum(size > 1 for size in parameter.shape)


def _is_router(model: nn.Module, name: str) -> bool:
    """Return whether a module has a weight with one row for each expert beside it."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return False
    rows = len(weight_of(module)) if isinstance(module, LINEAR_CLASSES) else len(weight)
    return any(rows == _experts(child) for child in parent.children() if child is not module)


def _experts(module: nn.Module) -> int:
    """Return how many experts a module holds, as children 0, 1, ... or in a fused weight; 0 if it has none."""
    fused = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return len(fused[0]) if fused else sum(name.isdecimal() for name, _ in module.named_children())

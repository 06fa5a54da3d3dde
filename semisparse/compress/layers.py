"""The decoder layers of a model, each with the linear layers that a recipe prunes in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from semisparse.compress.decoder import copy_to, decoder_layers, linear_layers
from semisparse.compress.recipe import Recipe
from semisparse.compress.staying_dense import is_ignored, matrix_dims, reason_to_stay_dense
from semisparse.errors import InputError
from semisparse.nn import weight_of
from semisparse.patterns import Pattern, parse_pattern


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer and the linear layers to prune in it.

    Args:
        name: its module name in the model.
        module: the decoder layer, whose weights are replaced in place.
        patterns: the pattern of each linear layer to prune, by its name in the decoder layer.
    """

    name: str
    module: nn.Module
    patterns: dict[str, Pattern]

    def full_name(self, linear: str) -> str:
        """Return a linear layer's module name in the model."""
        return f"{self.name}.{linear}"

    def copy(self, device: torch.device) -> nn.Module:
        """Copy the decoder layer with its present weights, in float32.

        In bfloat16, rounding errors hide the errors that a linear layer should compensate: KL of babyllama-1m at 2:4 is
        3.5 % higher.
        """
        return copy_to(self.module, device, torch.float32)

    def only(self, linears: Collection[str]) -> DecoderLayer:
        """Return the same decoder layer with only those of its linear layers to prune that are listed, by full name."""
        some = {name: pattern for name, pattern in self.patterns.items() if self.full_name(name) in linears}
        return replace(self, patterns=some)

    def weight(self, linear: str) -> Tensor:
        """Return a linear layer's weight as a view [N, K]."""
        return weight_of(self.module.get_submodule(linear))


def list_decoder_layers(model: nn.Module, recipe: Recipe, patterns: Mapping[str, Pattern]) -> list[DecoderLayer]:
    """List the decoder layers, each with the linear layers to prune in it.

    Args:
        model: a transformers causal language model.
        recipe: its `pattern` and `ignore`.
        patterns: by module name, for linear layers whose pattern is not the recipe's.

    Raises:
        InputError: the model has no linear layer to prune, or a fused weight that is not ignored.
    """
    default = parse_pattern(recipe.pattern)
    list_name, modules = decoder_layers(model)
    layers = []
    for index, module in enumerate(modules):
        prefix = f"{list_name}.{index}"
        _refuse_fused_weights(module, prefix, recipe)
        names = {name: f"{prefix}.{name}" for name in linear_layers(module)}
        own_patterns = {
            name: patterns.get(full, default)
            for name, full in names.items()
            if reason_to_stay_dense(model, full, recipe) is None
        }
        layers.append(DecoderLayer(prefix, module, own_patterns))
    if not any(layer.patterns for layer in layers):
        raise InputError(f"{type(model).__name__} has no linear layer to prune in {list_name}, or all are ignored")
    return layers


def _refuse_fused_weights(layer: nn.Module, prefix: str, recipe: Recipe) -> None:
    """Raise if a decoder layer has a weight of three dimensions that is neither ignored nor a convolution's."""
    for name, module in layer.named_modules(prefix=prefix):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            fused = matrix_dims(parameter) > 2 and not isinstance(module, _ConvNd)
            if fused and not is_ignored(recipe, name):
                raise InputError(
                    f"{name}.{parameter_name} is a fused weight of {parameter.dim()} dimensions in a module whose "
                    f"structure is unknown; list {name} under 'ignore' to leave it dense"
                )

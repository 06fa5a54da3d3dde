"""Propagate calibration activations through the decoder layers, while their linear layers are replaced one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from semisparse.compress.decoder import LayerCall, copy_to, decoder_layers, linear_layers, record_calls
from semisparse.compress.prune import RunningSums, Statistics
from semisparse.compress.recipe import Recipe
from semisparse.compress.routed import routed_statistics
from semisparse.compress.staying_dense import is_ignored, matrix_dims, reason_to_stay_dense
from semisparse.compress.three_pass import ThreePassLinear
from semisparse.compress.trace import RoutedLayers, SharedInput, capture, find_inputs
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

    def weight(self, linear: str) -> Tensor:
        """Return a linear layer's weight as a view [N, K]."""
        return weight_of(self.module.get_submodule(linear))


@dataclass
class Activations:
    """The hidden states of the calibration tokens before the current decoder layer.

    Args:
        calls: the arguments of each decoder layer, one call per batch.
        compressed: hidden states in the compressed model, [batch, tokens, features] float32 per batch.
        dense: the same in the dense model; None if nothing is compared with the dense model.
        residual_target: whether pruning, too, compares with the dense model (recipe key ``target=residual``), and not
            only tuning.
    """

    calls: list[list[LayerCall]]
    compressed: list[Tensor]
    dense: list[Tensor] | None
    residual_target: bool


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
        chosen = {
            name: patterns.get(full, default)
            for name, full in names.items()
            if reason_to_stay_dense(model, full, recipe) is None
        }
        layers.append(DecoderLayer(prefix, module, chosen))
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


def first_activations(
    model: nn.Module, layers: Sequence[DecoderLayer], batches: Sequence[Tensor], recipe: Recipe, device: torch.device
) -> Activations:
    """Compute the activations that enter the first decoder layer, in float32 on ``device``."""
    hidden, calls = record_calls(model, [layer.module for layer in layers], batches)
    hidden = [states.to(device, torch.float32) for states in hidden]
    moved: list[tuple[Tensor, Tensor]] = []
    calls = [[call.to(device, torch.float32, moved) for call in of_layer] for of_layer in calls]
    residual_target = recipe.prune == "sparsegpt" and recipe.target == "residual"
    keeps_dense = residual_target or recipe.tune != "none"
    return Activations(calls, hidden, list(hidden) if keeps_dense else None, residual_target)


def linears_with_statistics(
    layer: DecoderLayer, dense: nn.Module, working: nn.Module, activations: Activations, index: int
) -> Iterator[tuple[str, Tensor, Statistics]]:
    """Yield a decoder layer's linear layers in call order, each with the statistics of its inputs.

    The inputs are those in ``working``. The caller writes each new weight into ``working`` before it takes the next
    linear layer, so that every input depends on the linear layers already replaced.

    Args:
        layer: with the linear layers to prune.
        dense: its copy on the activations' device, float32.
        working: another such copy.
        activations: before the decoder layer.
        index: of the decoder layer.
    Yields:
        The name in the decoder layer; the weight in ``working`` ([N, K], a view), still dense; the statistics.
    """
    names = {name: layer.full_name(name) for name in layer.patterns}
    calls, hidden = activations.calls[index], activations.compressed
    for inputs in find_inputs(dense, names, calls[0], hidden[0]):
        if isinstance(inputs, RoutedLayers):
            yield from routed_statistics(working, inputs.linears, calls, hidden)
            continue
        sums = _sum_statistics(inputs, working, dense, activations, index)
        for name in inputs.linears:
            weight = weight_of(working.get_submodule(name))
            with errors_naming(names[name]):
                statistics = sums.statistics(name, weight)
            yield name, weight, statistics


def _sum_statistics(
    shared: SharedInput, working: nn.Module, dense: nn.Module, activations: Activations, index: int
) -> RunningSums:
    sums = RunningSums()
    dense_hidden = activations.dense if activations.residual_target and shared.all_tokens else None
    for batch, call in enumerate(activations.calls[index]):
        seen = capture(working, shared, call, activations.compressed[batch])
        if shared.point not in seen:
            continue
        if dense_hidden is None:
            sums.add(seen[shared.point], None, {})
            continue
        wanted = capture(dense, shared, call, dense_hidden[batch])
        gaps = {name: wanted[point] - seen[point] for name, point in shared.residuals.items()}
        sums.add(seen[shared.point], wanted[shared.point], gaps)
    return sums


def propagate(activations: Activations, index: int, compressed: nn.Module, dense: nn.Module) -> None:
    """Replace the activations before decoder layer ``index`` by those after it.

    Args:
        activations: changed in place.
        index: of the decoder layer.
        compressed: the decoder layer with its final weights, float32.
        dense: the decoder layer with its dense weights, float32.
    """
    calls = activations.calls[index]
    activations.compressed = [
        call(compressed, hidden) for call, hidden in zip(calls, activations.compressed, strict=True)
    ]
    if activations.dense is not None:
        activations.dense = [call(dense, hidden) for call, hidden in zip(calls, activations.dense, strict=True)]


@contextlib.contextmanager
def errors_naming(linear: str) -> Iterator[None]:
    """Put a linear layer's name before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"layer {linear}: {error}") from error


@contextlib.contextmanager
def float32_matmuls() -> Iterator[None]:
    """Compute float32 matmuls without TF32: a Hessian in TF32 precision is often singular.

    Linear layers on a GPU run in three bfloat16 products, which are accurate enough.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with ThreePassLinear():
            yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Prune a model to several candidates side by side: what the dense model computes, it computes once for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.hidden_states import empty_states
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.propagate import (
    Activations,
    dense_pass,
    errors_naming,
    first_activations,
    float32_matmuls,
    inputs_of,
    linears_with_statistics,
)
from semisparse.compress.prune import prune_layer
from semisparse.compress.recipe import Recipe
from semisparse.compress.routed import CalibratedLinear
from semisparse.compress.trace import Inputs, SharedInput
from semisparse.patterns import Pattern


def prune_side_by_side(
    model: nn.Module,
    layers: Sequence[DecoderLayer],
    candidates: Sequence[Mapping[str, Pattern]],
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    device: torch.device,
    progress: Callable[[int, int], None],
    ranks: Ranks,
    offload: Path | None,
    on_layer: Callable[[int, int, nn.Module, nn.Module], None],
) -> None:
    """Prune each decoder layer to every candidate, each on the outputs of its own layers before it.

    The weights are what `build_bank` would give for each candidate alone; they are gone with their decoder layer.

    Args:
        model: the dense model; it is not changed.
        layers: its decoder layers.
        candidates: the pattern of each linear layer of each candidate, by module name.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune; nothing is quantised or tuned.
        device: where to compute.
        progress: called before each decoder layer of each candidate, with the number of those done and of all.
        ranks: the processes that prune.
        offload: a directory for hidden states, as in `compress_decoder_layers`.
        on_layer: called with a candidate's number, the decoder layer's index, its dense and its pruned copy, float32.

    Raises:
        InputError: a weight or its inputs cannot be used.
    """
    with torch.no_grad(), float32_matmuls():
        first = first_activations(model, layers, batches, recipe, device, ranks=ranks, offload=offload, shared=True)
        models = [first, *(_another(first) for _ in candidates[1:])]
        for index, layer in enumerate(layers):
            dense = layer.copy(device)
            inputs = inputs_of(layer, dense, first, index)
            seen, after = dense_pass(dense, inputs, first, index)
            for number, (own, patterns) in enumerate(zip(models, candidates, strict=True)):
                progress(index * len(candidates) + number, len(layers) * len(candidates))
                own.seen, own.last = seen, {}
                pruned = _pruned(layer, dense, inputs, own, index, patterns, recipe)
                on_layer(number, index, dense, pruned)
                if layer is not layers[-1]:
                    _forward(pruned, inputs, own, index)
                own.last = None
            for batch, states in enumerate(after):
                assert first.dense is not None
                first.dense[batch] = states


def _another(first: Activations) -> Activations:
    """Return activations of another model that begins with the same hidden states; the dense ones are shared."""
    states = empty_states(first.offload, first.device)
    states.extend(first.compressed)
    return replace(first, compressed=states)


def _pruned(
    layer: DecoderLayer,
    dense: nn.Module,
    inputs: Inputs,
    activations: Activations,
    index: int,
    patterns: Mapping[str, Pattern],
    recipe: Recipe,
) -> nn.Module:
    """Return a copy of a decoder layer whose linear layers are pruned, as `bank.prune_densities` does."""

    def weight_of(linear: CalibratedLinear) -> Tensor:
        name, dtype = layer.full_name(linear.name), layer.weight(linear.name).dtype
        with errors_naming(name):
            pruned = prune_layer(linear.weight.to(dtype), patterns[name], linear.statistics(), recipe)
        return pruned.weight.to(dtype) + 0  # the cast may round a small weight to -0

    working = copy.deepcopy(dense)
    for alike in linears_with_statistics(layer, dense, working, activations, index, inputs):
        costs = [linear.weight.numel() for linear in alike]
        for linear, weight in zip(alike, activations.ranks.each(alike, costs, weight_of), strict=True):
            linear.weight.copy_(weight)
    return working


def _forward(pruned: nn.Module, inputs: Inputs, activations: Activations, index: int) -> None:
    """Replace the hidden states before a pruned decoder layer by those after it.

    Where the layer ends by adding the output of the linear layer that was pruned last, whose inputs are known, it does
    not run again. Whether it does shows on the first batch.
    """
    adds = False
    for batch, call in enumerate(activations.calls[index]):
        hidden = activations.compressed[batch]
        known = _last_sum(pruned, inputs, activations, batch, hidden) if adds or batch == 0 else None
        if not adds:
            output = call(pruned, hidden)
            adds = known is not None and torch.equal(known, output)
        activations.compressed[batch] = known if adds and known is not None else output


def _last_sum(pruned: nn.Module, inputs: Inputs, activations: Activations, batch: int, hidden: Tensor) -> Tensor | None:
    """Return the output of the last linear layer plus the residual stream before it; None if these are not known."""
    end, seen = inputs[-1], (activations.last or {}).get(batch, {})
    if not isinstance(end, SharedInput) or len(end.linears) > 1:
        return None
    name = end.linears[0]
    stream, x = seen.get(end.residuals.get(name, end.point)), seen.get(end.point)
    if name not in end.residuals or stream is None or x is None:
        return None
    shape = (*hidden.shape[:-1], -1)
    return stream.view(shape) + pruned.get_submodule(name)(x.view(shape))

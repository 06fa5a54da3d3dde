"""Units of a joint search: the linear layers that share an input and get one choice, and their compressed weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from semisparse.compress.choice import Choice, Option
from semisparse.compress.decoder import record_calls
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.prune import PrunedLayer, Statistics, prune_kinds
from semisparse.compress.recipe import Recipe
from semisparse.compress.search.masked import MaskedWeight, masked_layer
from semisparse.compress.trace import RoutedLayers, find_inputs
from semisparse.patterns import NO_ZEROS, parse_pattern
from semisparse.quant.symmetric import DTYPES, fake_quantise_rows

TRACED = 64
"""Tokens that a decoder layer runs, on a CPU, to show which linear layers share an input. For one of llama2-7b, 2,048
would take 0.8 TFLOP."""

OptionsOf = Callable[[Sequence[tuple[int, int]]], Sequence[Option]]
"""The shapes (N, K) of linear layers that share an input -> their options; the first is dense."""


@dataclass(frozen=True)
class Unit:
    """Linear layers of a decoder layer that share an input, and get the same choice: kernels can join them.

    Args:
        linears: module names of the linear layers in the model.
        decoder_layer: index of the decoder layer.
        options: what the unit may become; the first option is dense.
        weights: number of weights of all its linear layers.
    """

    linears: tuple[str, ...]
    decoder_layer: int
    options: tuple[Option, ...]
    weights: int


@dataclass(frozen=True)
class LinearChoices:
    """The choices of one linear layer. An index into them is what a bank and the scorer call a level.

    Args:
        name: module name of the linear layer in the model.
        decoder_layer: index of its decoder layer.
        choices: all choices.
        wanted: indices of the choices that are still in the search.
    """

    name: str
    decoder_layer: int
    choices: tuple[Choice, ...]
    wanted: frozenset[int]


def find_units(
    model: nn.Module,
    layers: Sequence[DecoderLayer],
    batches: Sequence[Tensor],
    options: OptionsOf,
    *,
    each_alone: bool = False,
) -> list[Unit]:
    """Group the linear layers of each decoder layer by input, those of experts by role (`find_inputs`).

    Args:
        model: the model that has the decoder layers.
        layers: the decoder layers, with the linear layers to compress.
        batches: token ids; the first `TRACED` tokens of one sequence are run, on a CPU.
        options: returns the options of a unit, given its shapes.
        each_alone: whether each linear layer is a unit of its own instead; linear layers of experts stay together.
    """
    hidden: list[Tensor] = []
    calls = record_calls(model, [layer.module for layer in layers], [batches[0][:1, :TRACED]], hidden.append)
    cpu = torch.device("cpu")
    units = []
    for index, layer in enumerate(layers):
        names = {name: layer.full_name(name) for name in layer.patterns}
        copied = layer.copy(cpu)
        call = calls[index][0].to(cpu, torch.float32, [])
        for inputs in find_inputs(copied, names, call, hidden[0].to(cpu).float()):
            alone = each_alone and not isinstance(inputs, RoutedLayers)
            for linears in [(name,) for name in inputs.linears] if alone else [tuple(inputs.linears)]:
                shapes = [(weight.shape[0], weight.shape[1]) for weight in map(layer.weight, linears)]
                weights = sum(n * k for n, k in shapes)
                units.append(Unit(tuple(names[name] for name in linears), index, tuple(options(shapes)), weights))
    return units


def compress_every_way(
    linear: LinearChoices,
    centre: int,
    known: Mapping[int, MaskedWeight],
    weight: Tensor,
    statistics: Statistics,
    recipe: Recipe,
    original: Tensor,
) -> dict[int, MaskedWeight]:
    """Compress a linear layer's weight by each of its choices; the arguments are those of `prune_densities`."""
    result = dict(known)
    levels = [level for level in sorted(linear.wanted) if level not in result]
    patterns = [linear.choices[level].pattern for level in levels]
    # Ways of one pattern follow each other, patterns in the order of the choices.
    levels = [
        level for pattern in dict.fromkeys(patterns) for level in levels if linear.choices[level].pattern == pattern
    ]
    choices = [linear.choices[level] for level in levels]
    ways = [(parse_pattern(choice.pattern), choice.recipe(recipe)) for choice in choices if choice.pattern != NO_ZEROS]
    pruned = prune_kinds(weight.to(original.dtype), ways, statistics) if ways else iter(())
    started = time.perf_counter()
    for level, choice in zip(levels, choices, strict=True):
        dense = choice.pattern == NO_ZEROS
        layer = PrunedLayer(original.to(weight), "dense", 0.0) if dense else next(pruned)
        if choice.quant in DTYPES:  # so that the score includes the rounding, which packing repeats
            layer = replace(layer, weight=fake_quantise_rows(layer.weight, DTYPES[choice.quant]))
        seconds, started = time.perf_counter() - started, time.perf_counter()
        pattern = parse_pattern(choice.pattern)
        result[level] = masked_layer(linear.name, pattern, layer, original.dtype, seconds)
    return result

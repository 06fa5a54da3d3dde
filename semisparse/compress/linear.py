"""Compress one linear layer of a decoder layer, and report on it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from semisparse.compress.choice import Choice
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.propagate import errors_naming
from semisparse.compress.prune import (
    PrunedLayer,
    Rows,
    Statistics,
    magnitude,
    piece_lengths,
    prune_layer,
    require_finite,
)
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, density_of
from semisparse.compress.routed import CalibratedLinear
from semisparse.compress.search.masked import MaskedWeight, to_dense
from semisparse.patterns import Pattern

Compressed = tuple[str, Tensor, LayerReport]
"""A linear layer's name in its decoder layer, its compressed weight [N, K] in the model's dtype, and the report."""


def check_pruned(layer: DecoderLayer, name: str, device: torch.device) -> Compressed:
    """Check that a weight pruned elsewhere obeys its pattern."""
    weight, pattern, full_name = layer.weight(name).to(device), layer.patterns[name], layer.full_name(name)
    with errors_naming(full_name):
        require_finite(weight)
        pattern.check(weight)
    return name, weight, LayerReport(full_name, str(pattern), density_of(weight), None, "none", 0.0)


def prune_by_magnitude(layer: DecoderLayer, name: str, device: torch.device) -> Compressed:
    """Prune without calibration text; errors are not measured."""
    started = time.perf_counter()
    weight, pattern, full_name = layer.weight(name).to(device), layer.patterns[name], layer.full_name(name)
    with errors_naming(full_name):
        require_finite(weight)
        weight = magnitude(weight, pattern)
    density, seconds = density_of(weight), time.perf_counter() - started
    return name, weight, LayerReport(full_name, str(pattern), density, None, "magnitude", seconds)


def copy_pruned(layer: DecoderLayer, name: str, pruned: Mapping[str, MaskedWeight], device: torch.device) -> Compressed:
    """Return the weight that a search has pruned."""
    masked, like = pruned[layer.full_name(name)], layer.weight(name)
    return name, to_dense(masked, torch.empty_like(like, device=device)), masked.report


def prune_linear(
    layer: DecoderLayer,
    recipe: Recipe,
    choices: Mapping[str, Choice],
    linear: CalibratedLinear,
    sharing: Ranks | None = None,
) -> Compressed:
    """Prune a linear layer; with ``sharing`` each of these processes prunes some of its rows."""
    started = time.perf_counter()
    pattern, full_name = layer.patterns[linear.name], layer.full_name(linear.name)
    choice = choices.get(full_name)
    with errors_naming(full_name):
        original = linear.weight.to(layer.weight(linear.name).dtype)
        if choice is not None and choice.is_dense:
            pruned = PrunedLayer(original, "dense", 0.0)
        else:
            own = recipe if choice is None else choice.recipe(recipe)
            statistics = linear.statistics()
            _warn_of_zero_inputs(full_name, statistics)
            if sharing:
                pruned = _prune_rows(original, pattern, statistics, own, sharing)
            else:
                pruned = prune_layer(original, pattern, statistics, own)
    weight = in_model_dtype(pruned.weight, layer, linear.name)
    density, seconds = density_of(weight), time.perf_counter() - started
    report = LayerReport(full_name, str(pattern), density, pruned.error, pruned.outcome, seconds, pruned.scales)
    return linear.name, weight, report


def _prune_rows(weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe, ranks: Ranks) -> PrunedLayer:
    """Prune a weight [N, K] with the other processes, this one its share of the rows; return the whole."""
    require_finite(weight)
    lengths = piece_lengths(len(weight))
    own = ranks.own(len(lengths))
    some = slice(sum(lengths[: own.start]), sum(lengths[: own.stop]))
    cross = None if statistics.cross is None else statistics.cross[some]
    rows = Rows([lengths[piece] for piece in own], ranks.join)
    pruned = prune_layer(weight[some], pattern, replace(statistics, cross=cross), recipe, rows)
    pieces = ranks.join(list(pruned.weight.split(list(rows.lengths or ()))))
    return replace(pruned, weight=torch.cat(pieces))


def _warn_of_zero_inputs(name: str, statistics: Statistics) -> None:
    """Warn of a linear layer whose error is 0 whatever is pruned; RMSNorm turns what overflows float32 into zeros."""
    if not statistics.hessian.diagonal().any():
        warnings.warn(
            f"{name}: all its inputs are zero on the calibration text, so nothing guides its compression and its error "
            "is 0: the model is damaged, or an earlier layer's outputs overflow",
            stacklevel=2,
        )


def in_model_dtype(weight: Tensor, layer: DecoderLayer, name: str) -> Tensor:
    """Return a weight in the model's dtype."""
    # The cast may round a small weight to -0; adding 0 turns it into +0.
    return weight.to(layer.weight(name).dtype) + 0

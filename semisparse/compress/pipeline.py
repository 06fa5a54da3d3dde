"""Compress a model one decoder layer at a time, each on the activations of the layers already compressed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.propagate import (
    Activations,
    DecoderLayer,
    errors_naming,
    first_activations,
    float32_matmuls,
    linears_with_statistics,
    list_decoder_layers,
    propagate,
)
from semisparse.compress.prune import magnitude, prune_layer, require_finite
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.search.bank import MaskedWeight, to_dense
from semisparse.compress.store import FinishedLayer, InPlace, LayerStore
from semisparse.compress.tune import TuningResult, split_for_steps, tune_decoder_layer, tune_end_to_end
from semisparse.nn import weight_of
from semisparse.patterns import Pattern


def compress_decoder_layers(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    patterns: Mapping[str, Pattern] | None = None,
    pruned: Mapping[str, MaskedWeight] | None = None,
    progress: Progress = lambda stage, done, total: None,
    store: LayerStore | None = None,
    on_tuned: Callable[[str, TuningResult], None] = lambda stage, result: None,
) -> list[LayerReport]:
    """Prune, quantise and tune the linear layers of a model's decoder layers.

    The model stays on its device; `device` holds two copies of one decoder layer and the calibration activations. The
    same inputs, device and number of threads give the same result, also after an interruption.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64; may be empty if `recipe.prune` is ``none``, or is
            ``magnitude`` without tuning, or if ``pruned`` is given and nothing is tuned.
        recipe: what to do.
        seed: for the order of the batches in tuning.
        device: where to compute, in float32.
        patterns: by module name, for linear layers whose pattern is not the recipe's.
        pruned: every linear layer's pruned weight by module name, if a search has pruned them.
        progress: called before each decoder layer, after each linear layer, and for each step of tuning.
        store: takes each finished decoder layer, and provides those of an interrupted run. By default, and always with
            ``tune=bqpo+e2e``, an `InPlace`: weights are written into the model.
        on_tuned: called with the stage and the result of each tuning in this run.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
        PatternError: `recipe.prune` is ``none`` and a weight does not obey its pattern.
    """
    layers, store, device = list_decoder_layers(model, recipe, patterns or {}), store or InPlace(), torch.device(device)
    alone = _compressed_alone(recipe, batches, pruned, device)
    if alone:
        return [report for finished in _each_alone(layers, alone, progress, store) for report in finished]
    check_batches(model, batches)
    if recipe.tune != "none":
        batches = split_for_steps(batches)
    model.eval()
    with torch.no_grad(), float32_matmuls():
        activations = first_activations(model, layers, batches, recipe, device)
        reports = [
            report
            for finished in _compress_in_order(layers, activations, recipe, pruned, seed, progress, store, on_tuned)
            for report in finished
        ]
        if recipe.tune != "bqpo+e2e":
            return reports
        result, reports = tune_end_to_end(
            model,
            batches,
            reports,
            rate=recipe.tune_rate,
            epochs=recipe.tune_epochs,
            seed=seed,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else next(model.parameters()).dtype,
            progress=partial(progress, "tuning end to end"),
        )
        on_tuned("end to end", result)
        return reports


Compressed = tuple[str, Tensor, LayerReport]
"""A linear layer's name in its decoder layer, its compressed weight [N, K] in the model's dtype, and the report."""


def _compressed_alone(
    recipe: Recipe, batches: Sequence[Tensor], pruned: Mapping[str, MaskedWeight] | None, device: torch.device
) -> Callable[[DecoderLayer], Iterator[Compressed]] | None:
    """Return a function that compresses a decoder layer without activations; None if the recipe needs activations."""
    if recipe.prune == "none":
        return partial(_check_layer, device=device)
    if recipe.prune == "magnitude" and recipe.tune == "none" and not batches:
        return partial(_prune_by_magnitude, device=device)
    if pruned and recipe.tune == "none":
        return partial(_copy_pruned, pruned=pruned, device=device)
    return None


def _each_alone(
    layers: Sequence[DecoderLayer],
    compress: Callable[[DecoderLayer], Iterator[Compressed]],
    progress: Progress,
    store: LayerStore,
) -> Iterator[Sequence[LayerReport]]:
    """Compress one decoder layer after another without activations; yield its reports."""
    for index, layer in enumerate(layers):
        progress(f"decoder layer {index + 1} of {len(layers)}", index, len(layers))
        finished = store.load(index, layer)
        if finished is None:
            linears = list(compress(layer))
            finished = FinishedLayer({name: weight for name, weight, _ in linears}, [report for *_, report in linears])
            store.save(index, layer, finished)
        yield finished.reports


def _compress_in_order(
    layers: Sequence[DecoderLayer],
    activations: Activations,
    recipe: Recipe,
    pruned: Mapping[str, MaskedWeight] | None,
    seed: int,
    progress: Progress,
    store: LayerStore,
    on_tuned: Callable[[str, TuningResult], None],
) -> Iterator[Sequence[LayerReport]]:
    """Compress one decoder layer after another, each on the activations of those before it; yield its reports."""
    done, total = 0, sum(len(layer.patterns) for layer in layers)
    for index, layer in enumerate(layers):
        stage = f"decoder layer {index + 1} of {len(layers)}"
        progress(stage, done, total)
        device = activations.compressed[0].device
        dense = layer.copy(device)
        working = copy.deepcopy(dense)
        finished = store.load(index, layer)
        if finished:
            for name, weight in finished.weights.items():
                weight_of(working.get_submodule(name)).copy_(weight)
        else:
            reports = []
            linears = _copy_pruned(layer, pruned, device) if pruned else None
            for name, weight, report in linears or _prune_layer(layer, dense, working, activations, index, recipe):
                weight_of(working.get_submodule(name)).copy_(weight)
                reports.append(report)
                progress(stage, done + len(reports), total)
            if recipe.tune != "none":
                step_progress = partial(progress, f"{stage}, tuning")
                result, reports = _tune_layer(
                    layer, dense, working, activations, index, recipe, reports, seed + index, step_progress
                )
                on_tuned(stage, result)
            names = [report.name.removeprefix(f"{layer.name}.") for report in reports]
            weights = {name: _rounded(weight_of(working.get_submodule(name)), layer, name) for name in names}
            finished = FinishedLayer(weights, reports)
            store.save(index, layer, finished)
        yield finished.reports
        done += len(finished.reports)
        if layer is not layers[-1]:
            propagate(activations, index, working, dense)


def _check_layer(layer: DecoderLayer, device: torch.device) -> Iterator[Compressed]:
    """Check that weights pruned elsewhere obey their patterns."""
    for name, pattern in layer.patterns.items():
        weight = layer.weight(name).to(device)
        with errors_naming(layer.full_name(name)):
            require_finite(weight)
            pattern.check(weight)
        yield name, weight, LayerReport(layer.full_name(name), str(pattern), _density(weight), None, "none", 0.0)


def _prune_by_magnitude(layer: DecoderLayer, device: torch.device) -> Iterator[Compressed]:
    """Prune without calibration text; errors are not measured."""
    for name, pattern in layer.patterns.items():
        started = time.perf_counter()
        weight = layer.weight(name).to(device)
        with errors_naming(layer.full_name(name)):
            require_finite(weight)
            weight = magnitude(weight, pattern)
        density, seconds = _density(weight), time.perf_counter() - started
        yield name, weight, LayerReport(layer.full_name(name), str(pattern), density, None, "magnitude", seconds)


def _copy_pruned(layer: DecoderLayer, pruned: Mapping[str, MaskedWeight], device: torch.device) -> Iterator[Compressed]:
    """Yield the weights that a search has pruned."""
    for name in layer.patterns:
        masked, like = pruned[layer.full_name(name)], layer.weight(name)
        yield name, to_dense(masked, torch.empty_like(like, device=device)), masked.report


def _prune_layer(
    layer: DecoderLayer, dense: nn.Module, working: nn.Module, activations: Activations, index: int, recipe: Recipe
) -> Iterator[Compressed]:
    """Prune a decoder layer's linear layers, each on the outputs of those already pruned.

    The caller writes each new weight into ``working`` before it takes the next.
    """
    for name, copied, statistics in linears_with_statistics(layer, dense, working, activations, index):
        started = time.perf_counter()
        pattern, full_name = layer.patterns[name], layer.full_name(name)
        with errors_naming(full_name):
            pruned = prune_layer(copied.to(layer.weight(name).dtype), pattern, statistics, recipe)
        weight = _rounded(pruned.weight, layer, name)
        density, seconds = _density(weight), time.perf_counter() - started
        report = LayerReport(full_name, str(pattern), density, pruned.error, pruned.outcome, seconds, pruned.scales)
        yield name, weight, report


def _rounded(weight: Tensor, layer: DecoderLayer, name: str) -> Tensor:
    """Return a weight in the model's dtype."""
    # The cast may round a small weight to -0; adding 0 turns it into +0.
    return weight.to(layer.weight(name).dtype) + 0


def _tune_layer(
    layer: DecoderLayer,
    dense: nn.Module,
    working: nn.Module,
    activations: Activations,
    index: int,
    recipe: Recipe,
    pruned: Sequence[LayerReport],
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[TuningResult, list[LayerReport]]:
    """Train the kept weights of a pruned decoder layer, ``working``; return the result and the updated reports."""
    dense_inputs, calls = activations.dense or [], activations.calls[index]
    device = activations.compressed[0].device
    scales = {
        report.name.removeprefix(f"{layer.name}."): report.scales.to(device) if report.scales else None
        for report in pruned
    }
    result, scales = tune_decoder_layer(
        working,
        scales,
        calls,
        activations.compressed,
        targets=[call(dense, hidden) for call, hidden in zip(calls, dense_inputs, strict=True)],
        rate=recipe.tune_rate,
        epochs=recipe.tune_epochs,
        seed=seed,
        progress=progress,
    )
    reports = []
    for report, (name, new_scales) in zip(pruned, scales.items(), strict=True):
        weight = weight_of(working.get_submodule(name))
        weight.copy_(_rounded(weight, layer, name))
        outcome = f"{report.outcome}, bqpo {result.outcome}"
        reports.append(replace(report, density=_density(weight), error=None, outcome=outcome, scales=new_scales))
    return result, reports


def _density(weight: Tensor) -> float:
    return int(weight.count_nonzero()) / weight.numel()

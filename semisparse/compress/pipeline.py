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
from semisparse.compress.journal import Journal
from semisparse.compress.propagate import (
    Activations,
    DecoderLayer,
    errors_naming,
    first_activations,
    linears_with_statistics,
    list_decoder_layers,
    no_tf32,
    propagate,
)
from semisparse.compress.prune import magnitude, prune_layer, require_finite
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.search.bank import MaskedWeight, to_dense
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
    journal: Journal | None = None,
    on_tuned: Callable[[str, TuningResult], None] = lambda stage, result: None,
) -> list[LayerReport]:
    """Prune, quantise and tune the linear layers of a model's decoder layers, in place.

    The model stays on its device; `device` holds two copies of one decoder layer and the calibration activations. The
    same inputs, device and number of threads give the same result, also after an interruption.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64; may be empty for `recipe.prune` ``none``, and for
            ``magnitude`` without tuning.
        recipe: what to do.
        seed: for the order of the batches in tuning.
        device: where to compute, in float32.
        patterns: by module name, for linear layers whose pattern is not the recipe's.
        pruned: every linear layer's pruned weight by module name, if a search has pruned them.
        progress: called before each decoder layer, after each linear layer, and for each step of tuning.
        journal: stores finished decoder layers, and provides those of an interrupted run.
        on_tuned: called with the stage and the result of each tuning in this run.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
        PatternError: `recipe.prune` is ``none`` and a weight does not obey its pattern.
    """
    layers = list_decoder_layers(model, recipe, patterns or {})
    if recipe.prune == "none":
        return [report for layer in layers for report in _check_layer(layer)]
    if recipe.prune == "magnitude" and recipe.tune == "none" and not batches:
        return [report for layer in layers for report in _prune_by_magnitude(layer)]
    if pruned and recipe.tune == "none":
        return [report for layer in layers for report in _copy_pruned(layer, pruned)]
    check_batches(model, batches)
    if recipe.tune != "none":
        batches = split_for_steps(batches)
    model.eval()
    device = torch.device(device)
    with torch.no_grad(), no_tf32():
        activations = first_activations(model, layers, batches, recipe, device)
        reports = [
            report
            for finished in _compress_in_order(layers, activations, recipe, pruned, seed, progress, journal, on_tuned)
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


def _compress_in_order(
    layers: Sequence[DecoderLayer],
    activations: Activations,
    recipe: Recipe,
    pruned: Mapping[str, MaskedWeight] | None,
    seed: int,
    progress: Progress,
    journal: Journal | None,
    on_tuned: Callable[[str, TuningResult], None],
) -> Iterator[list[LayerReport]]:
    """Compress one decoder layer after another, each on the activations of those before it; yield its reports."""
    done, total = 0, sum(len(layer.patterns) for layer in layers)
    for index, layer in enumerate(layers):
        stage = f"decoder layer {index + 1} of {len(layers)}"
        progress(stage, done, total)
        device = activations.compressed[0].device
        dense = layer.copy(device)
        finished = _restore(layer, index, journal) if journal else None
        if finished is None:
            finished = []
            reports = _copy_pruned(layer, pruned) if pruned else _prune_layer(layer, dense, activations, index, recipe)
            for report in reports:
                finished.append(report)
                progress(stage, done + len(finished), total)
            if recipe.tune != "none":
                step_progress = partial(progress, f"{stage}, tuning")
                result, finished = _tune_layer(
                    layer, dense, activations, index, recipe, finished, seed + index, step_progress
                )
                on_tuned(stage, result)
            if journal:
                journal.save_layer(index, {name: layer.weight(name) for name in layer.patterns}, finished)
        yield finished
        done += len(finished)
        propagate(activations, index, layer.copy(device), dense)


def _check_layer(layer: DecoderLayer) -> Iterator[LayerReport]:
    """Check that weights pruned elsewhere obey their patterns."""
    for name, pattern in layer.patterns.items():
        weight = layer.weight(name)
        with errors_naming(layer.full_name(name)):
            require_finite(weight)
            pattern.check(weight)
        yield LayerReport(layer.full_name(name), str(pattern), _density(weight), None, "none", 0.0)


def _prune_by_magnitude(layer: DecoderLayer) -> Iterator[LayerReport]:
    """Prune without calibration text; errors are not measured."""
    for name, pattern in layer.patterns.items():
        weight = layer.weight(name)
        started = time.perf_counter()
        with errors_naming(layer.full_name(name)):
            require_finite(weight)
            weight.copy_(magnitude(weight, pattern))
        seconds = time.perf_counter() - started
        yield LayerReport(layer.full_name(name), str(pattern), _density(weight), None, "magnitude", seconds)


def _restore(layer: DecoderLayer, index: int, journal: Journal) -> list[LayerReport] | None:
    """Load a decoder layer's weights and reports from the journal; None if it is not finished."""
    finished = journal.load_layer(index)
    if finished is None:
        return None
    weights, reports = finished
    for name, weight in weights.items():
        layer.weight(name).copy_(weight)
    return reports


def _copy_pruned(layer: DecoderLayer, pruned: Mapping[str, MaskedWeight]) -> Iterator[LayerReport]:
    """Copy the weights that a search has pruned into a decoder layer."""
    for name in layer.patterns:
        masked, weight = pruned[layer.full_name(name)], layer.weight(name)
        weight.copy_(to_dense(masked, weight))
        yield masked.report


def _prune_layer(
    layer: DecoderLayer, dense: nn.Module, activations: Activations, index: int, recipe: Recipe
) -> Iterator[LayerReport]:
    """Prune a decoder layer's linear layers, each on the outputs of those already pruned."""
    working = copy.deepcopy(dense)
    for name, copied, statistics in linears_with_statistics(layer, dense, working, activations, index):
        started = time.perf_counter()
        pattern, weight = layer.patterns[name], layer.weight(name)
        with errors_naming(layer.full_name(name)):
            pruned = prune_layer(copied.to(weight.dtype), pattern, statistics, recipe)
        weight.copy_(pruned.weight).add_(0)  # the cast may round a small weight to -0; adding 0 turns it into +0
        copied.copy_(weight)
        seconds = time.perf_counter() - started
        full_name, density = layer.full_name(name), _density(weight)
        yield LayerReport(full_name, str(pattern), density, pruned.error, pruned.outcome, seconds, pruned.scales)


def _tune_layer(
    layer: DecoderLayer,
    dense: nn.Module,
    activations: Activations,
    index: int,
    recipe: Recipe,
    pruned: Sequence[LayerReport],
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[TuningResult, list[LayerReport]]:
    """Train the kept weights of a pruned decoder layer; return the result and the updated reports."""
    dense_inputs, calls = activations.dense or [], activations.calls[index]
    device = activations.compressed[0].device
    tuned = layer.copy(device)
    scales = {
        report.name.removeprefix(f"{layer.name}."): report.scales.to(device) if report.scales else None
        for report in pruned
    }
    result, scales = tune_decoder_layer(
        tuned,
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
        weight = layer.weight(name)
        weight.copy_(weight_of(tuned.get_submodule(name))).add_(0)
        outcome = f"{report.outcome}, bqpo {result.outcome}"
        reports.append(replace(report, density=_density(weight), error=None, outcome=outcome, scales=new_scales))
    return result, reports


def _density(weight: Tensor) -> float:
    return int(weight.count_nonzero()) / weight.numel()

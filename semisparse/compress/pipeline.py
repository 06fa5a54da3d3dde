"""Compress a model one decoder layer at a time, each on the activations of the layers already compressed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.choice import Choice
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.hidden_states import empty_states
from semisparse.compress.layers import DecoderLayer, list_decoder_layers
from semisparse.compress.linear import (
    Compressed,
    check_pruned,
    copy_pruned,
    in_model_dtype,
    prune_by_magnitude,
    prune_linear,
)
from semisparse.compress.propagate import (
    Activations,
    first_activations,
    float32_matmuls,
    linears_with_statistics,
    propagate,
)
from semisparse.compress.prune import can_share_rows
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress, density_of
from semisparse.compress.search.masked import MaskedWeight
from semisparse.compress.store import FinishedLayer, InPlace, LayerStore, OnFirstRank
from semisparse.compress.trace import find_inputs
from semisparse.compress.tune import (
    TuningResult,
    dense_predictions,
    distil,
    split_for_steps,
    submodules_of,
    tune_decoder_layer,
    tune_end_to_end,
    tune_submodules,
)
from semisparse.nn import weight_of
from semisparse.patterns import Pattern, parse_pattern
from semisparse.quant.group import GroupScales


def compress_decoder_layers(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    patterns: Mapping[str, Pattern] | None = None,
    choices: Mapping[str, Choice] | None = None,
    pruned: Mapping[str, MaskedWeight] | None = None,
    progress: Progress = lambda stage, done, total: None,
    store: LayerStore | None = None,
    on_tuned: Callable[[str, TuningResult], None] = lambda stage, result: None,
    on_layer: Callable[[int, nn.Module, nn.Module], None] = lambda index, dense, compressed: None,
    ranks: Ranks | None = None,
    offload: Path | None = None,
) -> list[LayerReport]:
    """Prune, quantise and tune the linear layers of a model's decoder layers.

    The model stays on its device; `device` holds two copies of one decoder layer and the calibration activations. The
    same inputs, device, number of threads and parts of the sums give the same result, also after an interruption.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64; may be empty if `recipe.prune` is ``none``, or is
            ``magnitude`` without tuning, or if ``pruned`` is given and nothing is tuned.
        recipe: what to do.
        seed: for the order of the batches in tuning.
        device: where to compute, in float32.
        patterns: by module name, for linear layers whose pattern is not the recipe's.
        choices: by module name, for linear layers whose pattern and number of bits are not the recipe's.
        pruned: every linear layer's pruned weight by module name, if a search has pruned them.
        progress: called before each decoder layer, after each linear layer, and for each step of tuning.
        store: takes each finished decoder layer, and provides those of an interrupted run. By default an `InPlace`,
            which writes the weights into the model; what trains the whole model needs this one.
        on_tuned: called with the stage and the result of each tuning in this run.
        on_layer: called with each decoder layer's index, its dense copy and its compressed copy, on ``device``; only
            where layers are compressed on activations.
        ranks: the processes that call this with the same arguments; by default this one. Only the first uses its store.
        offload: a directory for the hidden states of the calibration tokens; by default they are on ``device``.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
        PatternError: `recipe.prune` is ``none`` and a weight does not obey its pattern.
    """
    ranks, device, choices = ranks or Ranks(), torch.device(device), choices or {}
    choice_patterns = {name: parse_pattern(choice.pattern) for name, choice in choices.items()}
    layers = list_decoder_layers(model, recipe, {**choice_patterns, **(patterns or {})})
    store = OnFirstRank(store or InPlace(), ranks)
    alone = _compressed_alone(recipe, batches, pruned, device)
    if alone:
        return [report for finished in _each_alone(layers, alone, progress, store, ranks) for report in finished]
    check_batches(model, batches)
    if recipe.tune != "none":
        batches = split_for_steps(batches)
    model.eval()
    compute_dtype = torch.float32 if device.type == "cpu" else next(model.parameters()).dtype
    predictions = None
    if recipe.needs_predictions:  # while the model is dense
        predictions = ranks.first(lambda: dense_predictions(model, batches, device, compute_dtype))
    with torch.no_grad(), float32_matmuls():
        activations = first_activations(
            model, layers, batches, recipe, device, ranks=ranks, offload=offload, shared=recipe.tune == "none"
        )
        reports = [
            report
            for finished in _compress_in_order(
                layers, activations, recipe, choices, pruned, seed, progress, store, on_tuned, on_layer
            )
            for report in finished
        ]
        if not recipe.tunes_end_to_end:
            return reports
        how: dict[str, Any] = {"rate": recipe.tune_rate, "epochs": recipe.tune_epochs, "seed": seed}
        how |= {"device": device, "dtype": compute_dtype, "predictions": predictions}
        how["progress"] = partial(progress, "tuning end to end")
        train = distil if recipe.tune == "bqpo+distil" else tune_end_to_end
        result, reports = ranks.first(lambda: train(model, batches, reports, **how))
        on_tuned("end to end", result)
        return reports


CompressAlone = Callable[[DecoderLayer, str], Compressed]
"""Compresses a linear layer, given its decoder layer and its name in that."""


def _compressed_alone(
    recipe: Recipe, batches: Sequence[Tensor], pruned: Mapping[str, MaskedWeight] | None, device: torch.device
) -> CompressAlone | None:
    """Return a function that compresses a linear layer without activations; None if the recipe needs activations."""
    if recipe.prune == "none":
        return partial(check_pruned, device=device)
    if recipe.prune == "magnitude" and recipe.tune == "none" and not batches:
        return partial(prune_by_magnitude, device=device)
    if pruned and recipe.tune == "none":
        return partial(copy_pruned, pruned=pruned, device=device)
    return None


def _each_alone(
    layers: Sequence[DecoderLayer],
    compress: CompressAlone,
    progress: Progress,
    store: LayerStore,
    ranks: Ranks,
) -> Iterator[Sequence[LayerReport]]:
    """Compress one decoder layer after another without activations; yield its reports."""
    for index, layer in enumerate(layers):
        progress(f"decoder layer {index + 1} of {len(layers)}", index, len(layers))
        finished = store.load(index, layer)
        if finished is None:
            costs = [layer.weight(name).numel() for name in layer.patterns]
            linears = list(ranks.each(list(layer.patterns), costs, partial(compress, layer)))
            finished = FinishedLayer({name: weight for name, weight, _ in linears}, [report for *_, report in linears])
            store.save(index, layer, finished)
        yield finished.reports


def _compress_in_order(
    layers: Sequence[DecoderLayer],
    activations: Activations,
    recipe: Recipe,
    choices: Mapping[str, Choice],
    pruned: Mapping[str, MaskedWeight] | None,
    seed: int,
    progress: Progress,
    store: LayerStore,
    on_tuned: Callable[[str, TuningResult], None],
    on_layer: Callable[[int, nn.Module, nn.Module], None],
) -> Iterator[Sequence[LayerReport]]:
    """Compress one decoder layer after another, each on the activations of those before it; yield its reports."""
    done, total = 0, sum(len(layer.patterns) for layer in layers)
    for index, layer in enumerate(layers):
        stage = f"decoder layer {index + 1} of {len(layers)}"
        progress(stage, done, total)
        dense = layer.copy(activations.device)
        working = copy.deepcopy(dense)
        finished = store.load(index, layer)
        if finished:
            for name, weight in finished.weights.items():
                weight_of(working.get_submodule(name)).copy_(weight)
        else:
            reports = []
            for name, weight, report in (
                (copy_pruned(layer, name, pruned, activations.device) for name in layer.patterns)
                if pruned
                else _prune_layer(layer, dense, working, activations, index, recipe, choices)
            ):
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
            weights = {name: in_model_dtype(weight_of(working.get_submodule(name)), layer, name) for name in names}
            finished = FinishedLayer(weights, reports)
            store.save(index, layer, finished)
        yield finished.reports
        done += len(finished.reports)
        on_layer(index, dense, working)
        if layer is not layers[-1]:
            propagate(activations, index, working, dense)


def _prune_layer(
    layer: DecoderLayer,
    dense: nn.Module,
    working: nn.Module,
    activations: Activations,
    index: int,
    recipe: Recipe,
    choices: Mapping[str, Choice],
) -> Iterator[Compressed]:
    """Prune a decoder layer's linear layers, each on the outputs of those already pruned.

    The caller writes each new weight into ``working`` before it takes the next.
    """
    prune, ranks = partial(prune_linear, layer, recipe, choices), activations.ranks
    for alike in linears_with_statistics(layer, dense, working, activations, index):
        alone = alike[0].name if len(alike) == 1 else None
        if alone and can_share_rows(alike[0].weight, layer.patterns[alone], recipe) and not choices:
            yield prune(alike[0], ranks)  # one process alone takes the same pieces, and ends in the same bytes
            continue
        costs = [linear.weight.numel() for linear in alike]
        yield from ranks.each(alike, costs, prune)


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
    """Train the kept weights of a pruned decoder layer, ``working``; return the result and the updated reports.

    The first rank trains: every step begins where the last one ended.
    """
    calls, device = activations.calls[index], activations.device
    linears = {report.name.removeprefix(f"{layer.name}."): report for report in pruned}

    def train() -> tuple[TuningResult, Mapping[str, GroupScales | None], list[Tensor]]:
        scales = {name: report.scales.to(device) if report.scales else None for name, report in linears.items()}
        how: dict[str, Any] = {"rate": recipe.tune_rate, "epochs": recipe.tune_epochs, "seed": seed}
        new_states = partial(empty_states, activations.offload, device)
        before = activations.dense or []
        if recipe.tune_units == "submodules":
            names = {name: layer.full_name(name) for name in linears}
            parts = submodules_of(find_inputs(dense, names, calls[0], before[0]))
            more = {"new_states": new_states, "progress": progress, **how}
            result, scales = tune_submodules(
                working, dense, parts, scales, calls, activations.compressed, before, **more
            )
        else:
            targets = new_states()
            targets.extend(call(dense, hidden) for call, hidden in zip(calls, before, strict=True))
            result, scales = tune_decoder_layer(
                working, scales, calls, activations.compressed, targets=targets, progress=progress, **how
            )
        return result, scales, [in_model_dtype(weight_of(working.get_submodule(name)), layer, name) for name in linears]

    result, new_scales, weights = activations.ranks.first(train)
    reports = []
    for (name, report), weight in zip(linears.items(), weights, strict=True):
        weight_of(working.get_submodule(name)).copy_(weight)
        outcome = f"{report.outcome}, bqpo {result.outcome}"
        reports.append(
            replace(report, density=density_of(weight), error=None, outcome=outcome, scales=new_scales[name])
        )
    return result, reports

"""Compress a model block by block, each on the activations of the blocks already compressed."""

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
from semisparse.compress.prune import magnitude, prune_layer, require_finite
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.search.bank import Stored, expand
from semisparse.compress.tune import Trained, cut_for_steps, tune_block, tune_end_to_end
from semisparse.compress.walk import (
    Block,
    Tokens,
    advance,
    full_float32,
    layers_in_turn,
    list_blocks,
    naming,
    start_tokens,
)
from semisparse.nn import weight_of
from semisparse.patterns import Pattern


def compress_blocks(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    patterns: Mapping[str, Pattern] | None = None,
    pruned: Mapping[str, Stored] | None = None,
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
    trained: Callable[[str, Trained], None] = lambda stage, found: None,
) -> list[LayerReport]:
    """Prune and tune the linear layers of a causal language model's decoder blocks, in place.

    The model stays where it is; two copies of one block at a time, and the calibration tokens, are on `device`.
    The result is the same for the same inputs, device and number of threads, also if it was interrupted and resumed.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64; may be empty where `recipe.prune` looks at weights
            alone (``none``, ``magnitude``).
        recipe: what to do.
        seed: of the order in which tuning sees the batches.
        device: where to compute, in float32.
        patterns: by module name, for the layers whose pattern is not the recipe's.
        pruned: every layer's weight by module name, if a search has pruned them.
        progress: called before each block, after each layer and, while a block is tuned, with its steps.
        journal: keeps finished blocks, and gives those of an interrupted run.
        trained: told what each tuning of this run did.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
        PatternError: `recipe.prune` is ``none`` and a weight does not obey its pattern.
    """
    blocks = list_blocks(model, recipe, patterns or {})
    if recipe.prune == "none":
        return [report for block in blocks for report in _check_block(block)]
    if recipe.prune == "magnitude" and recipe.tune == "none" and not batches:
        return [report for block in blocks for report in _prune_by_magnitude(block)]
    if pruned and recipe.tune == "none":
        return [report for block in blocks for report in _take_over(block, pruned)]
    check_batches(model, batches)
    if recipe.tune != "none":
        batches = cut_for_steps(batches)
    model.eval()
    device = torch.device(device)
    with torch.no_grad(), full_float32():
        tokens = start_tokens(model, blocks, batches, recipe, device)
        reports = [
            report
            for finished in _compress_in_turn(blocks, tokens, recipe, pruned, seed, progress, journal, trained)
            for report in finished
        ]
        if recipe.tune != "bqpo+e2e":
            return reports
        found, reports = tune_end_to_end(
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
        trained("end to end", found)
        return reports


def _compress_in_turn(
    blocks: Sequence[Block],
    tokens: Tokens,
    recipe: Recipe,
    pruned: Mapping[str, Stored] | None,
    seed: int,
    progress: Progress,
    journal: Journal | None,
    trained: Callable[[str, Trained], None],
) -> Iterator[list[LayerReport]]:
    """Compress one block after another, each on the tokens as the blocks before it leave them."""
    done, total = 0, sum(len(block.patterns) for block in blocks)
    for index, block in enumerate(blocks):
        stage = f"block {index + 1} of {len(blocks)}"
        progress(stage, done, total)
        device = tokens.compressed[0].device
        dense = block.copy(device)
        finished = _restore(block, index, journal) if journal else None
        if finished is None:
            finished = []
            reports = _take_over(block, pruned) if pruned else _prune_block(block, dense, tokens, index, recipe)
            for report in reports:
                finished.append(report)
                progress(stage, done + len(finished), total)
            if recipe.tune != "none":
                steps_done = partial(progress, f"{stage}, tuning")
                found, finished = _tune_block(block, dense, tokens, index, recipe, finished, seed + index, steps_done)
                trained(stage, found)
            if journal:
                journal.save(index, {name: block.weight(name) for name in block.patterns}, finished)
        yield finished
        done += len(finished)
        advance(tokens, index, block.copy(device), dense)


def _check_block(block: Block) -> Iterator[LayerReport]:
    for name, pattern in block.patterns.items():
        weight = block.weight(name)
        with naming(block.full_name(name)):
            require_finite(weight)
            pattern.check(weight)
        yield LayerReport(block.full_name(name), str(pattern), _density(weight), None, "none", 0.0)


def _prune_by_magnitude(block: Block) -> Iterator[LayerReport]:
    """Prune without calibration text, so that nothing is known of the outputs' error."""
    for name, pattern in block.patterns.items():
        weight = block.weight(name)
        started = time.perf_counter()
        with naming(block.full_name(name)):
            require_finite(weight)
            weight.copy_(magnitude(weight, pattern))
        seconds = time.perf_counter() - started
        yield LayerReport(block.full_name(name), str(pattern), _density(weight), None, "magnitude", seconds)


def _restore(block: Block, index: int, journal: Journal) -> list[LayerReport] | None:
    """Take over a block that an interrupted run has finished."""
    kept = journal.load(index)
    if kept is None:
        return None
    weights, reports = kept
    for name, weight in weights.items():
        block.weight(name).copy_(weight)
    return reports


def _take_over(block: Block, pruned: Mapping[str, Stored]) -> Iterator[LayerReport]:
    """Put weights in place that are pruned already."""
    for name in block.patterns:
        stored, weight = pruned[block.full_name(name)], block.weight(name)
        weight.copy_(expand(stored, weight))
        yield stored.report


def _prune_block(block: Block, dense: nn.Module, tokens: Tokens, index: int, recipe: Recipe) -> Iterator[LayerReport]:
    """Prune the block's layers, each on the outputs of those already pruned."""
    working = copy.deepcopy(dense)
    for name, copied, statistics in layers_in_turn(block, dense, working, tokens, index):
        started = time.perf_counter()
        pattern, weight = block.patterns[name], block.weight(name)
        with naming(block.full_name(name)):
            pruned = prune_layer(copied.to(weight.dtype), pattern, statistics, recipe)
        weight.copy_(pruned.weight).add_(0)  # adding 0 makes +0 of the -0 that a small weight may be rounded to
        copied.copy_(weight)
        seconds = time.perf_counter() - started
        full_name, density = block.full_name(name), _density(weight)
        yield LayerReport(full_name, str(pattern), density, pruned.error, pruned.outcome, seconds, pruned.scales)


def _tune_block(
    block: Block,
    dense: nn.Module,
    tokens: Tokens,
    index: int,
    recipe: Recipe,
    pruned: Sequence[LayerReport],
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[Trained, list[LayerReport]]:
    """Train the kept weights of a pruned block, and give what that did and the block's reports anew."""
    dense_inputs, calls = tokens.dense or [], tokens.calls[index]
    device = tokens.compressed[0].device
    tuned = block.copy(device)
    scales = {
        report.name.removeprefix(f"{block.prefix}."): report.scales.to(device) if report.scales else None
        for report in pruned
    }
    found, scales = tune_block(
        tuned,
        scales,
        calls,
        tokens.compressed,
        targets=[call(dense, hidden) for call, hidden in zip(calls, dense_inputs, strict=True)],
        rate=recipe.tune_rate,
        epochs=recipe.tune_epochs,
        seed=seed,
        progress=progress,
    )
    reports = []
    for report, (name, rounding) in zip(pruned, scales.items(), strict=True):
        weight = block.weight(name)
        weight.copy_(weight_of(tuned.get_submodule(name))).add_(0)
        outcome = f"{report.outcome}, bqpo {found.outcome}"
        reports.append(replace(report, density=_density(weight), error=None, outcome=outcome, scales=rounding))
    return found, reports


def _density(weight: Tensor) -> float:
    return int(weight.count_nonzero()) / weight.numel()

"""Compress a model block by block, each on the activations of the blocks already compressed."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import Tensor, nn

from semisparse.compress.blocks import Call, decoder_blocks, linear_layers, record_calls
from semisparse.compress.calibration import check_batches
from semisparse.compress.journal import Journal
from semisparse.compress.prune import RunningSums, magnitude, prune_layer, require_finite
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport
from semisparse.compress.stages import Stage, find_stages, read_stage
from semisparse.errors import InputError
from semisparse.nn import weight_of
from semisparse.patterns import Pattern, parse_pattern


class Progress(Protocol):
    """Told how far a compression is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take what runs now, the layers done and the layers to do in all."""


@dataclass(frozen=True)
class _Block:
    """A decoder block of the model.

    Args:
        prefix: its module name in the model.
        module: the block itself, whose weights are replaced.
        patterns: for each layer to prune, by its name in the block, the pattern.
    """

    prefix: str
    module: nn.Module
    patterns: dict[str, Pattern]

    def full_name(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def copy(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(self.module).to(device, dtype)

    def weight(self, name: str) -> Tensor:
        return weight_of(self.module.get_submodule(name))


@dataclass
class _Tokens:
    """The calibration tokens on their way through the blocks.

    Args:
        calls: for each block, what the model passes to it, one call a batch.
        compressed: hidden states before the current block in the compressed model, one a batch.
        dense: the same in the dense model; None where no layer aims at the dense output.
    """

    calls: list[list[Call]]
    compressed: list[Tensor]
    dense: list[Tensor] | None


def compress_blocks(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    patterns: Mapping[str, Pattern] | None = None,
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
) -> list[LayerReport]:
    """Prune the linear layers of a causal language model's decoder blocks, in place.

    The model stays where it is; two copies of one block at a time, and the calibration tokens, are on `device`.
    The result is the same for the same inputs, device and number of threads, also if it was interrupted and resumed.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64; may be empty where `recipe.prune` looks at weights
            alone (``none``, ``magnitude``).
        recipe: what to do.
        device: where to compute; in float32 on a CPU, in the model's dtype elsewhere.
        patterns: by module name, for the layers whose pattern is not the recipe's.
        progress: called before each block and after each layer.
        journal: keeps finished blocks, and gives those of an interrupted run.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
        PatternError: `recipe.prune` is ``none`` and a weight does not obey its pattern.
    """
    blocks = _blocks(model, recipe, patterns or {})
    total = sum(len(block.patterns) for block in blocks)
    if recipe.prune == "none":
        return [report for block in blocks for report in _check_block(block)]
    if recipe.prune == "magnitude" and not batches:
        return [report for block in blocks for report in _prune_by_magnitude(block)]
    check_batches(model, batches)
    model.eval()
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else next(model.parameters()).dtype
    reports: list[LayerReport] = []
    with torch.no_grad(), _full_float32():
        tokens = _start(model, blocks, batches, recipe, device, dtype)
        for index, block in enumerate(blocks):
            stage = f"block {index + 1} of {len(blocks)}"
            progress(stage, len(reports), total)
            dense = block.copy(device, dtype)
            finished = journal.load(index) if journal else None
            if finished:
                weights, found = finished
                for name, weight in weights.items():
                    block.weight(name).copy_(weight)
                reports += found
            else:
                for report in _compress_block(block, dense, tokens, index, recipe):
                    reports.append(report)
                    progress(stage, len(reports), total)
                if journal:
                    weights = {name: block.weight(name) for name in block.patterns}
                    journal.save(index, weights, reports[len(reports) - len(block.patterns) :])
            _advance(tokens, index, block.copy(device, dtype), dense)
    return reports


def _blocks(model: nn.Module, recipe: Recipe, patterns: Mapping[str, Pattern]) -> list[_Block]:
    """List the decoder blocks with the layers to prune in each."""
    default = parse_pattern(recipe.pattern)

    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in recipe.ignore)

    list_name, modules = decoder_blocks(model)
    blocks = []
    for index, module in enumerate(modules):
        prefix = f"{list_name}.{index}"
        for name, parameter in module.named_parameters(prefix):
            owner = name.rpartition(".")[0]
            if parameter.dim() > 2 and not ignored(owner):
                raise InputError(
                    f"{name} is a fused weight of {parameter.dim()} dimensions, only linear layers can be pruned; "
                    f"list {owner} under 'ignore' to leave it dense"
                )
        names = {name: f"{prefix}.{name}" for name in linear_layers(module)}
        chosen = {name: patterns.get(full, default) for name, full in names.items() if not ignored(full)}
        blocks.append(_Block(prefix, module, chosen))
    if not any(block.patterns for block in blocks):
        raise InputError(f"{type(model).__name__} has no linear layer to prune in {list_name}, or all are ignored")
    return blocks


def _check_block(block: _Block) -> Iterator[LayerReport]:
    for name, pattern in block.patterns.items():
        weight = block.weight(name)
        with _naming(block.full_name(name)):
            require_finite(weight)
            pattern.check(weight)
        yield LayerReport(block.full_name(name), str(pattern), _density(weight), None, "none", 0.0)


def _prune_by_magnitude(block: _Block) -> Iterator[LayerReport]:
    """Prune without calibration text, so that nothing is known of the outputs' error."""
    for name, pattern in block.patterns.items():
        weight = block.weight(name)
        started = time.perf_counter()
        with _naming(block.full_name(name)):
            require_finite(weight)
            weight.copy_(magnitude(weight, pattern))
        seconds = time.perf_counter() - started
        yield LayerReport(block.full_name(name), str(pattern), _density(weight), None, "magnitude", seconds)


def _start(
    model: nn.Module,
    blocks: Sequence[_Block],
    batches: Sequence[Tensor],
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
) -> _Tokens:
    hidden, calls = record_calls(model, [block.module for block in blocks], batches)
    hidden = [states.to(device, dtype) for states in hidden]
    calls = [[call.to(device, dtype) for call in of_block] for of_block in calls]
    aims_at_dense = recipe.prune == "sparsegpt" and recipe.target == "residual"
    return _Tokens(calls, hidden, list(hidden) if aims_at_dense else None)


def _compress_block(
    block: _Block, dense: nn.Module, tokens: _Tokens, index: int, recipe: Recipe
) -> Iterator[LayerReport]:
    """Prune the block's layers stage by stage, the inputs of each stage coming from the stages already pruned."""
    working = copy.deepcopy(dense)
    names = {name: block.full_name(name) for name in block.patterns}
    call = tokens.calls[index][0].to(tokens.compressed[0].device, torch.float32)
    for stage in find_stages(copy.deepcopy(dense).float(), names, call, tokens.compressed[0].float()):
        sums = _measure(stage, working, dense, tokens, index)
        for name in stage.linears:
            started = time.perf_counter()
            copied = weight_of(working.get_submodule(name))
            with _naming(names[name]):
                pruned = prune_layer(copied, block.patterns[name], sums.of_layer(name, copied.float()), recipe)
            weight = block.weight(name)
            weight.copy_(pruned.weight).add_(0)  # adding 0 makes +0 of the -0 that a small weight may be rounded to
            copied.copy_(weight)
            seconds = time.perf_counter() - started
            pattern = str(block.patterns[name])
            yield LayerReport(names[name], pattern, _density(weight), pruned.error, pruned.outcome, seconds)


def _measure(stage: Stage, working: nn.Module, dense: nn.Module, tokens: _Tokens, index: int) -> RunningSums:
    sums = RunningSums()
    dense_hidden = tokens.dense if stage.every_token else None
    for position, call in enumerate(tokens.calls[index]):
        seen = read_stage(working, stage, call, tokens.compressed[position])
        if stage.entry not in seen:
            continue
        if dense_hidden is None:
            sums.add(seen[stage.entry], None, {})
            continue
        wanted = read_stage(dense, stage, call, dense_hidden[position])
        gaps = {name: wanted[point] - seen[point] for name, point in stage.streams.items()}
        sums.add(seen[stage.entry], wanted[stage.entry], gaps)
    return sums


def _advance(tokens: _Tokens, index: int, compressed: nn.Module, dense: nn.Module) -> None:
    """Take the tokens through a finished block."""
    calls = tokens.calls[index]
    tokens.compressed = [call(compressed, hidden) for call, hidden in zip(calls, tokens.compressed, strict=True)]
    if tokens.dense is not None:
        tokens.dense = [call(dense, hidden) for call, hidden in zip(calls, tokens.dense, strict=True)]


def _density(weight: Tensor) -> float:
    return int(weight.count_nonzero()) / weight.numel()


@contextlib.contextmanager
def _naming(layer: str) -> Iterator[None]:
    """Put the layer's name before the message of an error."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"layer {layer}: {error}") from error


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Compute float32 products in float32, not in TF32: a Hessian rounded so is often singular."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

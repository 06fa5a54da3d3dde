"""The bank: every linear layer's weight, pruned to every level before the search (RheoSparse, section III B)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.propagate import (
    Activations,
    errors_naming,
    first_activations,
    float32_matmuls,
    linears_with_statistics,
    propagate,
)
from semisparse.compress.prune import Statistics, prune_levels
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.routed import CalibratedLinear
from semisparse.compress.search.masked import (
    MaskedWeight,
    masked_from_json,
    masked_layer,
    masked_to_json,
    to_dense,
)
from semisparse.compress.search.space import Candidate, LinearSpace
from semisparse.nn import weight_of

Bank = dict[str, dict[int, MaskedWeight]]
"""Pruned weights by module name of the linear layer and by level: in host memory, or mapped from the journal."""


class Levels(Protocol):
    """The levels of one linear layer, as a bank and the scorer see them."""

    @property
    def name(self) -> str:
        """Module name of the linear layer in the model."""

    @property
    def decoder_layer(self) -> int:
        """Index of its decoder layer."""


AnyLevels = TypeVar("AnyLevels", bound=Levels)

PruneLevels = Callable[
    [AnyLevels, int, Mapping[int, MaskedWeight], Tensor, Statistics, Recipe, Tensor], dict[int, MaskedWeight]
]
"""(levels, centre, known, weight, statistics, recipe, original) -> the weight at every level; see `prune_densities`."""


def build_bank(
    model: nn.Module,
    layers: Sequence[DecoderLayer],
    space: Sequence[AnyLevels],
    centre: Candidate,
    centre_weights: Mapping[str, MaskedWeight],
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    number: int,
    device: torch.device,
    progress: Progress,
    journal: Journal | None,
    prune: PruneLevels[AnyLevels],
    ranks: Ranks,
    offload: Path | None,
    on_layer: Callable[[int, nn.Module, nn.Module], None] = lambda index, dense, at_centre: None,
) -> Bank:
    """Prune every linear layer to every level, on the outputs of the layers before it at their centre level.

    Args:
        model: the dense model; it is not changed.
        layers: its decoder layers, or the first ones.
        space: the levels of their linear layers.
        centre: the centre level of each linear layer.
        centre_weights: the weights at the centre, by module name, if they are known; else empty, and the centre is
            pruned, too.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune.
        number: number of the bank; it identifies the bank's pieces in the journal.
        device: where to compute.
        progress: called before each decoder layer.
        journal: stores finished decoder layers, and provides those of an interrupted run.
        prune: returns a weight at every level, such as `prune_densities`.
        ranks: the processes that build the bank.
        offload: a directory for hidden states, as in `compress_decoder_layers`.
        on_layer: called with each decoder layer's index, its dense copy and its copy at the centre level, in float32.

    Raises:
        InputError: a weight or its inputs cannot be used.
    """
    by_name = {linear.name: (linear, level) for linear, level in zip(space, centre, strict=True)}
    bank: Bank = {}
    with _Writer(journal, number, ranks) as writer, torch.no_grad(), float32_matmuls():
        activations = first_activations(
            model, layers, batches, recipe, device, ranks=ranks, offload=offload, shared=True
        )
        for index, layer in enumerate(layers):
            progress("pruning every layer in every way", index, len(layers))
            dense = layer.copy(device)
            pruned = _load(journal, index, number) if journal else None
            if pruned is None:
                pruned = _prune_decoder_layer(layer, dense, activations, index, by_name, centre_weights, recipe, prune)
                writer.save(index, pruned)
            else:
                bank |= pruned
            at_centre = copy.deepcopy(dense)
            for name in layer.patterns:
                full_name, weight = layer.full_name(name), weight_of(at_centre.get_submodule(name))
                weight.copy_(to_dense(pruned[full_name][by_name[full_name][1]], weight))
            on_layer(index, dense, at_centre)
            if layer is not layers[-1]:
                propagate(activations, index, at_centre, dense)
    return bank | writer.bank


class _Writer:
    """Writes the decoder layers of a bank to the journal, each while the next one is pruned.

    Args:
        journal: where to write; None to keep them in memory.
        number: of the bank.
        ranks: the processes.
    """

    def __init__(self, journal: Journal | None, number: int, ranks: Ranks) -> None:
        self._journal, self._number, self._ranks = journal, number, ranks
        self._pool = ThreadPoolExecutor(1)
        self._writing: tuple[int, Future[None]] | None = None
        self.bank: Bank = {}
        """What was saved. What was written is read from its file when it is needed: it takes no memory."""

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        with self._pool:  # waits for the thread
            if failure is None:
                self._finish()

    def save(self, index: int, pruned: Bank) -> None:
        """Begin to write decoder layer ``index``, once the one before is written."""
        self._finish()
        if self._journal is None:
            self.bank |= pruned
        else:
            self._writing = index, self._pool.submit(_save, self._journal, index, self._number, pruned)

    def _finish(self) -> None:
        """Wait until what is being written is written."""
        if self._writing is not None and self._journal is not None:
            index, writing = self._writing
            self._ranks.first(writing.result)
            self.bank |= _bank_of(*self._journal.written("bank", index))
        self._writing = None


def _prune_decoder_layer(
    layer: DecoderLayer,
    dense: nn.Module,
    activations: Activations,
    index: int,
    by_name: Mapping[str, tuple[AnyLevels, int]],
    centre_weights: Mapping[str, MaskedWeight],
    recipe: Recipe,
    prune: PruneLevels[AnyLevels],
) -> Bank:
    """Prune the linear layers of a decoder layer to every level; ``by_name`` has their levels and centre levels."""

    def every_level(linear: CalibratedLinear) -> dict[int, MaskedWeight]:
        full_name = layer.full_name(linear.name)
        levels, centre = by_name[full_name]
        known = {centre: centre_weights[full_name]} if centre_weights else {}
        original = layer.weight(linear.name)
        with errors_naming(full_name):
            return prune(levels, centre, known, linear.weight, linear.statistics(), recipe, original)

    working, pruned = copy.deepcopy(dense), {}
    for alike in linears_with_statistics(layer, dense, working, activations, index):
        costs = [linear.weight.numel() for linear in alike]
        for linear, levels in zip(alike, activations.ranks.each(alike, costs, every_level), strict=True):
            full_name = layer.full_name(linear.name)
            linear.weight.copy_(to_dense(levels[by_name[full_name][1]], linear.weight))
            pruned[full_name] = levels
    return pruned


def prune_densities(
    space: LinearSpace,
    centre: int,
    known: Mapping[int, MaskedWeight],
    weight: Tensor,
    statistics: Statistics,
    recipe: Recipe,
    original: Tensor,
) -> dict[int, MaskedWeight]:
    """Prune a linear layer to the density of every level, and cast the results to the original weight's dtype.

    Args:
        space: the levels of the linear layer.
        centre: its centre level.
        known: weights by level that need not be pruned again.
        weight: [N, K] float32, dense.
        statistics: statistics of the linear layer's inputs.
        recipe: how to prune.
        original: the weight in the model; its dtype is that of the results.
    """
    # The first level determines the pruning order of the columns for all: it is the centre, or next to it.
    levels = sorted(space.patterns.keys() - known, key=lambda level: (abs(level - centre), level))
    if not levels:  # the format stores no other level, or the pass has none
        return dict(known)
    pruned = prune_levels(weight.to(original.dtype), [space.patterns[level] for level in levels], statistics, recipe)
    result, started = dict(known), time.perf_counter()
    for level, layer in zip(levels, pruned, strict=True):
        seconds, started = time.perf_counter() - started, time.perf_counter()
        result[level] = masked_layer(space.name, space.patterns[level], layer, original.dtype, seconds)
    return result


def _save(journal: Journal, index: int, number: int, pruned: Mapping[str, Mapping[int, MaskedWeight]]) -> None:
    tensors: dict[str, Tensor] = {}
    layers = [
        {"level": level, "report": masked_to_json(masked, tensors, f"{name} {level}")}
        for name, levels in pruned.items()
        for level, masked in levels.items()
    ]
    journal.save("bank", index, tensors, {"bank": number, "layers": layers})


def _load(journal: Journal, index: int, number: int) -> Bank | None:
    """Load a decoder layer of this bank from the journal; None if it is not finished."""
    piece = journal.load("bank", index, lambda notes: bool(notes["bank"] == number))
    return _bank_of(*piece) if piece else None


def _bank_of(tensors: dict[str, Tensor], notes: Any) -> Bank:
    """Return the weights of a piece of the journal."""
    pruned: Bank = {}
    for layer in notes["layers"]:
        name, level = layer["report"]["name"], layer["level"]
        pruned.setdefault(name, {})[level] = masked_from_json(layer["report"], tensors, f"{name} {level}")
    return pruned

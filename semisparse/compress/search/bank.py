"""The bank: every linear layer's weight, pruned to every level before the search (RheoSparse, section III B).

Weights are stored as a bit mask and non-zero values, or as codes; a candidate's weights are expanded from them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal, report_from_json, report_to_json
from semisparse.compress.propagate import (
    Activations,
    DecoderLayer,
    errors_naming,
    first_activations,
    float32_matmuls,
    linears_with_statistics,
    propagate,
)
from semisparse.compress.prune import PrunedLayer, Statistics, prune_levels
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.routed import CalibratedLinear
from semisparse.compress.search.space import Candidate, LinearSpace
from semisparse.nn import weight_of
from semisparse.patterns import Pattern
from semisparse.quant.group import GroupScales


class MaskedWeight(NamedTuple):
    """A pruned weight, stored as a mask and values, or if it is quantised as codes.

    Args:
        mask: [ceil(N K / 8)] uint8, one bit per weight, the lowest bit first; empty if all weights come from codes.
        values: [kept] in the model's dtype, the non-zero weights in row-major order. With codes uint8: those of all
            groups, of ``report.scales``; two in a byte if they have up to 4 bits, the first in the lower half.
        report: how the weight was pruned.
    """

    mask: Tensor
    values: Tensor
    report: LayerReport

    def to(self, device: torch.device) -> MaskedWeight:
        """Copy it to a device, to a GPU without waiting for what that still computes."""
        scales = self.report.scales
        if scales:
            scales = replace(scales, scale=_copied(scales.scale, device), zero=_copied(scales.zero, device))
        report = replace(self.report, scales=scales)
        return MaskedWeight(_copied(self.mask, device), _copied(self.values, device), report)

    @property
    def nbytes(self) -> int:
        """Its bytes, without those of the scales."""
        return self.mask.nbytes + self.values.nbytes


Bank = dict[str, dict[int, MaskedWeight]]
"""Pruned weights by module name of the linear layer and by level: in host memory, or mapped from the journal."""


def to_masked(weight: Tensor, report: LayerReport) -> MaskedWeight:
    """Store a weight [N, K] with few bytes, on the CPU."""
    mask, values = _coded(weight, report.scales) or _masked(weight)
    scales = report.scales and report.scales.to(torch.device("cpu"))
    return MaskedWeight(mask.cpu(), values.cpu(), replace(report, scales=scales))


def _masked(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight's mask and non-zero values."""
    flat = weight.contiguous().view(-1)
    mask = flat != 0
    return _bits(mask), flat[mask]


def _bits(mask: Tensor) -> Tensor:
    """Return a flat mask with 8 weights in a byte."""
    bits = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (bits << _bit_positions(mask.device)).sum(1, dtype=torch.uint8)


def _coded(weight: Tensor, scales: GroupScales | None) -> tuple[Tensor, Tensor] | None:
    """Return a quantised weight's mask and codes; None where they do not give exactly this weight."""
    if scales is None or scales.scale.dtype != weight.dtype:
        return None
    codes = scales.codes(weight)
    values = scales.values(codes).flatten(1)[:, : weight.shape[1]]
    kept = weight != 0
    if not torch.equal(values * kept, weight):
        return None
    needs_mask = bool((values != 0).logical_and(~kept).any())
    mask = _bits(kept.flatten()) if needs_mask else torch.empty(0, dtype=torch.uint8)
    flat = codes.flatten()
    if scales.bits > 4:
        return mask, flat
    low, high = torch.nn.functional.pad(flat, (0, len(flat) % 2)).view(-1, 2).unbind(1)
    return mask, low | high << 4


def to_dense(masked: MaskedWeight, like: Tensor) -> Tensor:
    """Expand a masked weight to the shape, dtype and device of ``like``."""
    packed_mask, values, report = masked.to(like.device)
    mask, scales = None, report.scales
    if len(packed_mask):
        bits = (packed_mask[:, None] >> _bit_positions(like.device)) & 1
        mask = bits.flatten()[: like.numel()].bool()
    if scales is None or values.dtype != torch.uint8:
        assert mask is not None
        weight = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        # Unlike weight[mask] = values, this does not wait for the GPU to count the mask's bits.
        return weight.masked_scatter_(mask, values.to(like.dtype)).view(like.shape)
    groups = scales.scale.shape
    if scales.bits <= 4:
        values = torch.stack((values & 15, values >> 4), 1).flatten()[: groups.numel() * scales.size]
    weight = scales.values(values.view(*groups, scales.size)).flatten(1)[:, : like.shape[1]].to(like.dtype)
    return weight + 0 if mask is None else weight.masked_fill(~mask.view(like.shape), 0)  # 0 + -0 is 0


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of a bank to a device, to a GPU without waiting for what it still computes."""
    pins = device.type == "cuda" and not tensor.is_cuda and tensor.numel() > 0
    return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)


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


def masked_layer(name: str, pattern: Pattern, layer: PrunedLayer, dtype: torch.dtype, seconds: float) -> MaskedWeight:
    """Cast a pruned weight to ``dtype``, and store it with its report."""
    weight = layer.weight.to(dtype)
    density = int(weight.count_nonzero()) / weight.numel()
    report = LayerReport(name, str(pattern), density, layer.error, layer.outcome, seconds, layer.scales)
    return to_masked(weight, report)


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


def masked_to_json(masked: MaskedWeight, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Return a masked weight's report as JSON values, and add its tensors to ``tensors``, named after ``key``."""
    tensors |= {f"{key} mask": masked.mask, f"{key} values": masked.values}
    return report_to_json(masked.report, tensors, key)


def masked_from_json(notes: Mapping[str, Any], tensors: dict[str, Tensor], key: str) -> MaskedWeight:
    """Return the masked weight that `masked_to_json` wrote, and remove its tensors from ``tensors``."""
    mask, values = tensors.pop(f"{key} mask"), tensors.pop(f"{key} values")
    return MaskedWeight(mask, values, report_from_json(notes, tensors, key))


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

"""The bank: every layer pruned at every level, kept as mask and values, so that a candidate is quickly assembled."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.journal import Journal, note_report, read_report
from semisparse.compress.prune import Statistics, prune_levels
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import LayerReport, Progress
from semisparse.compress.search.space import Choice, Levels
from semisparse.compress.walk import (
    Block,
    advance,
    full_float32,
    layers_in_turn,
    naming,
    start_tokens,
)
from semisparse.nn import weight_of


class Stored(NamedTuple):
    """A pruned weight.

    Args:
        mask: [ceil(N K / 8)] uint8, a bit a weight, the lowest bit first.
        values: [kept] in the model's dtype, the weights that are not zero, row by row.
        report: how it was pruned.
    """

    mask: Tensor
    values: Tensor
    report: LayerReport


Bank = dict[str, dict[int, Stored]]
"""By a layer's module name and level; on the host."""


def store(weight: Tensor, report: LayerReport) -> Stored:
    """Store a weight ([N, K]) as mask and values."""
    flat = weight.contiguous().view(-1)
    mask = flat != 0
    bits = torch.nn.functional.pad(mask, (0, -len(flat) % 8)).view(-1, 8)
    return Stored((bits << _places(flat.device)).sum(1, dtype=torch.uint8).cpu(), flat[mask].cpu(), report)


def expand(stored: Stored, like: Tensor) -> Tensor:
    """Give a stored weight in the shape, dtype and device of another."""
    bits = (stored.mask.to(like.device)[:, None] >> _places(like.device)) & 1
    mask = bits.flatten()[: like.numel()].bool()
    weight = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
    weight[mask] = stored.values.to(like.device, like.dtype)
    return weight.view(like.shape)


def build_bank(
    model: nn.Module,
    blocks: Sequence[Block],
    choices: Sequence[Choice],
    centre: Levels,
    held: Mapping[str, Stored],
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    number: int,
    device: torch.device,
    progress: Progress,
    journal: Journal | None,
) -> Bank:
    """Prune every layer at every level, each on the outputs of the layers before it as they are at the centre.

    Args:
        model: stays as it is.
        blocks: of the model.
        choices: of their layers.
        centre: a level of each choice.
        held: the weights at the centre, by module name; none for those that pruning to it gives.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune.
        number: of the bank, which tells its blocks in the journal from another's.
        device: where to compute.
        progress: called before each block.
        journal: keeps finished blocks, and gives those of an interrupted run.

    Raises:
        InputError: a weight or its inputs cannot be used.
    """
    of_layer = {choice.name: (choice, level) for choice, level in zip(choices, centre, strict=True)}
    bank: Bank = {}
    with torch.no_grad(), full_float32():
        tokens = start_tokens(model, blocks, batches, recipe, device)
        for index, block in enumerate(blocks):
            progress("every layer at every density", index, len(blocks))
            dense = block.copy(device)
            stored = _recall(journal, index, number) if journal else None
            if stored is None:
                stored = {}
                working = copy.deepcopy(dense)
                for name, weight, statistics in layers_in_turn(block, dense, working, tokens, index):
                    full_name = block.full_name(name)
                    choice, level = of_layer[full_name]
                    known = {level: held[full_name]} if held else {}
                    with naming(full_name):
                        of_levels = _prune(choice, level, known, weight, statistics, recipe, block.weight(name))
                    weight.copy_(expand(of_levels[level], weight))
                    stored[full_name] = of_levels
                if journal:
                    _keep(journal, index, number, stored)
            at_centre = copy.deepcopy(dense)
            for name in block.patterns:
                full_name, weight = block.full_name(name), weight_of(at_centre.get_submodule(name))
                weight.copy_(expand(stored[full_name][of_layer[full_name][1]], weight))
            advance(tokens, index, at_centre, dense)
            bank |= stored
    return bank


def _prune(
    choice: Choice,
    centre: int,
    known: Mapping[int, Stored],
    weight: Tensor,
    statistics: Statistics,
    recipe: Recipe,
    original: Tensor,
) -> dict[int, Stored]:
    """Prune a layer at every level that is not known, rounded to the original's dtype as it will be in the model."""
    # The first is the centre or next to it: its order of the columns serves all.
    levels = sorted(choice.patterns.keys() - known, key=lambda level: (abs(level - centre), level))
    if not levels:  # nothing but the centre can be stored, or is near
        return dict(known)
    pruned = prune_levels(weight.to(original.dtype), [choice.patterns[level] for level in levels], statistics, recipe)
    found, started = dict(known), time.perf_counter()
    for level, layer in zip(levels, pruned, strict=True):
        rounded = layer.weight.to(original.dtype)
        density = int(rounded.count_nonzero()) / rounded.numel()
        seconds, started = time.perf_counter() - started, time.perf_counter()
        pattern = str(choice.patterns[level])
        report = LayerReport(choice.name, pattern, density, layer.error, layer.outcome, seconds, layer.scales)
        found[level] = store(rounded, report)
    return found


def _keep(journal: Journal, index: int, number: int, stored: Mapping[str, Mapping[int, Stored]]) -> None:
    tensors: dict[str, Tensor] = {}
    layers = [
        {"level": level, "report": note_stored(entry, tensors, f"{name} {level}")}
        for name, levels in stored.items()
        for level, entry in levels.items()
    ]
    journal.keep("bank", index, tensors, {"bank": number, "layers": layers})


def _recall(journal: Journal, index: int, number: int) -> dict[str, dict[int, Stored]] | None:
    """Take over a block that an interrupted run has finished, for the same bank."""
    found = journal.recall("bank", index)
    if found is None or found[1]["bank"] != number:
        return None
    tensors, notes = found
    stored: dict[str, dict[int, Stored]] = {}
    for layer in notes["layers"]:
        name, level = layer["report"]["name"], layer["level"]
        stored.setdefault(name, {})[level] = read_stored(layer["report"], tensors, f"{name} {level}")
    return stored


def note_stored(stored: Stored, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Write a pruned weight for a journal: its report as JSON values, its tensors among others."""
    tensors |= {f"{key} mask": stored.mask, f"{key} values": stored.values}
    return note_report(stored.report, tensors, key)


def read_stored(notes: Mapping[str, Any], tensors: dict[str, Tensor], key: str) -> Stored:
    """Read what `note_stored` wrote."""
    mask, values = tensors.pop(f"{key} mask"), tensors.pop(f"{key} values")
    return Stored(mask, values, read_report(notes, tensors, key))


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

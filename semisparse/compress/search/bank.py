"""The bank: every layer pruned at every level, kept as mask and values, so that a candidate is quickly assembled."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.journal import Journal
from semisparse.compress.prune import Statistics, prune_levels
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.space import Choice
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
    """

    mask: Tensor
    values: Tensor


Bank = dict[str, dict[int, Stored]]
"""By a layer's module name and level; on the host."""


def store(weight: Tensor) -> Stored:
    """Store a weight ([N, K]) as mask and values."""
    flat = weight.contiguous().view(-1)
    mask = flat != 0
    bits = torch.nn.functional.pad(mask, (0, -len(flat) % 8)).view(-1, 8)
    return Stored((bits << _places(flat.device)).sum(1, dtype=torch.uint8).cpu(), flat[mask].cpu())


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
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    device: torch.device,
    progress: Progress,
    journal: Journal | None,
) -> Bank:
    """Prune every layer at every level, each on the outputs of the layers before it pruned uniformly.

    Args:
        model: stays as it is.
        blocks: of the model.
        choices: of their layers.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune.
        device: where to compute.
        progress: called before each block.
        journal: keeps finished blocks, and gives those of an interrupted run.

    Raises:
        InputError: a weight or its inputs cannot be used.
    """
    of_layer = {choice.name: choice for choice in choices}
    bank: Bank = {}
    with torch.no_grad(), full_float32():
        tokens = start_tokens(model, blocks, batches, recipe, device)
        for index, block in enumerate(blocks):
            progress("every layer at every density", index, len(blocks))
            dense = block.copy(device)
            found = journal.recall("bank", index) if journal else None
            if found:
                stored = _unflattened(found[0])
            else:
                stored = {}
                working = copy.deepcopy(dense)
                for name, weight, statistics in layers_in_turn(block, dense, working, tokens, index):
                    full_name = block.full_name(name)
                    with naming(full_name):
                        stored[full_name] = _prune(of_layer[full_name], weight, statistics, recipe, block.weight(name))
                    weight.copy_(expand(stored[full_name][0], weight))
                if journal:
                    journal.keep("bank", index, _flattened(stored), None)
            pruned = copy.deepcopy(dense)
            for name in block.patterns:
                weight = weight_of(pruned.get_submodule(name))
                weight.copy_(expand(stored[block.full_name(name)][0], weight))
            advance(tokens, index, pruned, dense)
            bank |= stored
    return bank


def _prune(
    choice: Choice, weight: Tensor, statistics: Statistics, recipe: Recipe, original: Tensor
) -> dict[int, Stored]:
    """Prune a layer at every level, rounded to the original's dtype as it will be in the model."""
    levels = sorted(choice.patterns, key=abs)  # the uniform level first: its order of the columns serves all
    pruned = prune_levels(weight.to(original.dtype), [choice.patterns[level] for level in levels], statistics, recipe)
    return {level: store(found.weight.to(original.dtype)) for level, found in zip(levels, pruned, strict=True)}


def _flattened(stored: Mapping[str, Mapping[int, Stored]]) -> dict[str, Tensor]:
    return {
        f"{name} {level} {part}": tensor
        for name, levels in stored.items()
        for level, entry in levels.items()
        for part, tensor in entry._asdict().items()
    }


def _unflattened(tensors: Mapping[str, Tensor]) -> dict[str, dict[int, Stored]]:
    stored: dict[str, dict[int, Stored]] = {}
    for key in tensors:
        name, level, part = key.split(" ")
        if part == "mask":
            entry = Stored(tensors[key], tensors[f"{name} {level} values"])
            stored.setdefault(name, {})[int(level)] = entry
    return stored


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

"""Take calibration tokens through a model's decoder blocks, layer by layer, as its layers are replaced one by one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from semisparse.compress.blocks import Call, decoder_blocks, linear_layers, record_calls
from semisparse.compress.prune import RunningSums, Statistics
from semisparse.compress.recipe import Recipe
from semisparse.compress.stages import Stage, find_stages, read_stage
from semisparse.errors import InputError
from semisparse.nn import weight_of
from semisparse.patterns import Pattern, parse_pattern


@dataclass(frozen=True)
class Block:
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
        """Give a layer's module name in the model."""
        return f"{self.prefix}.{name}"

    def copy(self, device: torch.device) -> nn.Module:
        """Copy the block as it is now, in float32.

        In bfloat16 the errors that a layer should undo drown in those of rounding: 3.5 % of KL at 2:4 on babyllama-1m.
        """
        return copy.deepcopy(self.module).to(device, torch.float32)

    def weight(self, name: str) -> Tensor:
        """Give a layer's weight as a view [N, K]."""
        return weight_of(self.module.get_submodule(name))


@dataclass
class Tokens:
    """The calibration tokens on their way through the blocks.

    Args:
        calls: for each block, what the model passes to it, one call a batch.
        compressed: hidden states before the current block in the compressed model, one a batch.
        dense: the same in the dense model; None where nothing aims at the dense outputs.
        layers_aim_at_dense: whether layers do while they are pruned, and not only blocks while they are tuned.
    """

    calls: list[list[Call]]
    compressed: list[Tensor]
    dense: list[Tensor] | None
    layers_aim_at_dense: bool


def list_blocks(model: nn.Module, recipe: Recipe, patterns: Mapping[str, Pattern]) -> list[Block]:
    """List the decoder blocks with the layers to prune in each; `patterns` as in `compress_blocks`.

    Raises:
        InputError: the model has no layer to prune, or a fused weight that is not ignored.
    """
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
        blocks.append(Block(prefix, module, chosen))
    if not any(block.patterns for block in blocks):
        raise InputError(f"{type(model).__name__} has no linear layer to prune in {list_name}, or all are ignored")
    return blocks


def start_tokens(
    model: nn.Module, blocks: Sequence[Block], batches: Sequence[Tensor], recipe: Recipe, device: torch.device
) -> Tokens:
    """Take the calibration tokens as far as the first block, in float32."""
    hidden, calls = record_calls(model, [block.module for block in blocks], batches)
    hidden = [states.to(device, torch.float32) for states in hidden]
    calls = [[call.to(device, torch.float32) for call in of_block] for of_block in calls]
    aims_at_dense = recipe.prune == "sparsegpt" and recipe.target == "residual"
    keeps_dense = aims_at_dense or recipe.tune != "none"
    return Tokens(calls, hidden, list(hidden) if keeps_dense else None, aims_at_dense)


def layers_in_turn(
    block: Block, dense: nn.Module, working: nn.Module, tokens: Tokens, index: int
) -> Iterator[tuple[str, Tensor, Statistics]]:
    """Give a block's layers in the order of their calls, the inputs of each coming from the layers already replaced.

    Args:
        block: with the layers to give.
        dense: its copy on the tokens' device, float32.
        working: another copy; whoever takes a layer writes the new weight into it before taking the next.
        tokens: before the block.
        index: of the block.
    Yields:
        name in the block; the layer's weight in `working` ([N, K], a view), still dense; statistics of its inputs.
    """
    names = {name: block.full_name(name) for name in block.patterns}
    for stage in find_stages(dense, names, tokens.calls[index][0], tokens.compressed[0]):
        sums = _measure(stage, working, dense, tokens, index)
        for name in stage.linears:
            weight = weight_of(working.get_submodule(name))
            with naming(names[name]):
                statistics = sums.of_layer(name, weight)
            yield name, weight, statistics


def _measure(stage: Stage, working: nn.Module, dense: nn.Module, tokens: Tokens, index: int) -> RunningSums:
    sums = RunningSums()
    dense_hidden = tokens.dense if tokens.layers_aim_at_dense and stage.every_token else None
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


def advance(tokens: Tokens, index: int, compressed: nn.Module, dense: nn.Module) -> None:
    """Take the tokens through a finished block."""
    calls = tokens.calls[index]
    tokens.compressed = [call(compressed, hidden) for call, hidden in zip(calls, tokens.compressed, strict=True)]
    if tokens.dense is not None:
        tokens.dense = [call(dense, hidden) for call, hidden in zip(calls, tokens.dense, strict=True)]


@contextlib.contextmanager
def naming(layer: str) -> Iterator[None]:
    """Put the layer's name before the message of an error."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"layer {layer}: {error}") from error


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products in float32, not in TF32: a Hessian rounded so is often singular."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Statistics of experts' linear layers: each reads the calibration tokens that the router sends to its expert."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall
from semisparse.compress.prune import RunningSums, Statistics
from semisparse.compress.trace import HookPoint, Reached, expert_of, hooked
from semisparse.errors import InputError
from semisparse.nn import weight_of

ENOUGH = 0.25
"""An expert is pruned for the tokens routed to it if these are at least this many per input feature, else for all."""

PASS_BYTES = 4 << 30
"""Maximum bytes of the Hessians that one pass over the calibration tokens accumulates."""

LayerStatistics = tuple[str, Tensor, Statistics]
"""A linear layer's name in the decoder layer, its weight [N, K] and its statistics."""


@torch.no_grad()
def routed_statistics(
    layer: nn.Module, linears: Sequence[str], calls: Sequence[LayerCall], hidden: Sequence[Tensor]
) -> Iterator[LayerStatistics]:
    """Yield the linear layers that have the same role in several experts, with the statistics of their inputs.

    An expert that too few tokens were routed to gets the statistics of all tokens that any expert reads.

    Args:
        layer: the decoder layer, float32. The caller may write new weights to the linear layers that were yielded.
        linears: names of the linear layers in it.
        calls: its arguments, one call per batch.
        hidden: its inputs, [batch, tokens, features] float32 per batch.

    Raises:
        InputError: an expert that too few tokens were routed to cannot be called by itself.
    """
    columns = weight_of(layer.get_submodule(linears[0])).shape[1]
    at_once = max(1, PASS_BYTES // (4 * columns**2))
    for start in range(0, len(linears), at_once):
        names = linears[start : start + at_once]
        sums = _sums_of_routed(layer, names, calls, hidden)
        few = [name for name in names if sums[name].tokens < ENOUGH * columns]
        sums_of_all = _sums_of_all(layer, few, calls, hidden) if few else {}
        for name in names:
            weight = weight_of(layer.get_submodule(name))
            statistics = sums_of_all.get(name, sums[name]).statistics(name, weight)
            if name in sums_of_all:
                statistics = replace(statistics, note=f"on all tokens, {sums[name].tokens} were routed to it")
            yield name, weight, statistics


def _sums_of_routed(
    layer: nn.Module, names: Collection[str], calls: Sequence[LayerCall], hidden: Sequence[Tensor]
) -> dict[str, RunningSums]:
    sums = {name: RunningSums() for name in names}

    def observe(point: HookPoint, activation: Tensor) -> None:
        if point.side == "input":
            sums[point.module].add(activation, None, {})

    with hooked(layer, names, observe):
        for call, states in zip(calls, hidden, strict=True):
            call(layer, states)
    return sums


def _sums_of_all(
    layer: nn.Module, names: Sequence[str], calls: Sequence[LayerCall], hidden: Sequence[Tensor]
) -> dict[str, RunningSums]:
    """Return the sums that experts would have if every token were routed to them."""
    sums = {name: RunningSums() for name in names}
    for call, states in zip(calls, hidden, strict=True):
        tokens = _tokens_of_experts(layer, names[0], call, states)
        for name in names:
            sums[name].add(_input_of(layer, name, tokens), None, {})
    return sums


def _tokens_of_experts(layer: nn.Module, name: str, call: LayerCall, hidden: Tensor) -> Tensor:
    """Return the tokens [tokens, K] that reach the module that calls the experts."""
    owner = (expert_of(name) or "").rpartition(".")[0]
    if isinstance(layer.get_submodule(owner), nn.ModuleList):
        owner = owner.rpartition(".")[0]
    seen: list[Tensor] = []

    def observe(point: HookPoint, activation: Tensor) -> None:
        seen.append(activation)
        raise Reached

    with hooked(layer, [owner], observe), contextlib.suppress(Reached):
        call(layer, hidden)
    return seen[0][seen[0].any(dim=-1)]  # Llama 4 passes every token to every expert, as zeros if not routed to it


def _input_of(layer: nn.Module, name: str, tokens: Tensor) -> Tensor:
    """Return a linear layer's input if its expert is called with all tokens."""
    expert = expert_of(name) or ""
    seen: list[Tensor] = []

    def observe(point: HookPoint, activation: Tensor) -> None:
        seen.append(activation)
        raise Reached

    with hooked(layer, [name], observe), contextlib.suppress(Reached):
        try:
            layer.get_submodule(expert)(tokens)
        except (TypeError, RuntimeError) as error:
            raise InputError(
                f"too few calibration tokens reached {name}, and {expert} cannot be called with all tokens: {error}; "
                "use more samples, or list it under 'ignore'"
            ) from error
    return seen[0]

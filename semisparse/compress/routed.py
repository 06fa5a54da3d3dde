"""Statistics of experts' linear layers: each reads the calibration tokens that the router sends to its expert."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall
from semisparse.compress.distributed.ranks import Parts, Ranks
from semisparse.compress.prune import RunningSums, Statistics
from semisparse.compress.trace import HookPoint, Reached, expert_of, hooked
from semisparse.errors import InputError
from semisparse.nn import weight_of

ENOUGH = 0.25
"""An expert is pruned for the tokens routed to it if they are at least this many per input feature, else for all
tokens."""

PASS_BYTES = 4 << 30
"""Maximum bytes of the Hessians that one pass over the calibration tokens accumulates."""


class CalibratedLinear(NamedTuple):
    """A linear layer and what is known of its inputs.

    Args:
        name: in the decoder layer.
        weight: [N, K], a view, still dense.
        statistics: returns the statistics of its inputs; each call takes a matmul.
    """

    name: str
    weight: Tensor
    statistics: Callable[[], Statistics]


RoutedSums = Mapping[str, RunningSums]


@torch.no_grad()
def routed_statistics(
    layer: nn.Module,
    linears: Sequence[str],
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    ranks: Ranks,
    parts: Parts,
) -> Iterator[list[CalibratedLinear]]:
    """Yield linear layers that have one role in several experts: as many at a time as `PASS_BYTES` holds Hessians.

    An expert that too few tokens were routed to gets the statistics of all tokens that any expert reads.

    Args:
        layer: the decoder layer, float32. The caller may write new weights to the linear layers that were yielded.
        linears: names of the linear layers in it.
        calls: its arguments, one call per batch.
        hidden: its inputs, [batch, tokens, features] float32 per batch.
        ranks: the processes among which the batches are divided.
        parts: of the sums over all batches, those that this rank computes from ``calls`` and ``hidden``.

    Raises:
        InputError: an expert that too few tokens were routed to cannot be called by itself.
    """
    columns = weight_of(layer.get_submodule(linears[0])).shape[1]
    sums_at_a_time = ranks.parts.bit_length()
    at_once = max(1, PASS_BYTES // (4 * columns**2 * sums_at_a_time))
    for start in range(0, len(linears), at_once):
        names = linears[start : start + at_once]
        sums = ranks.sum(parts, partial(_sums_of_routed, layer, names, calls, hidden), _merge)
        few = [name for name in names if sums[name].tokens < ENOUGH * columns]
        of_all = ranks.sum(parts, partial(_sums_of_all, layer, few, calls, hidden), _merge) if few else {}
        yield [
            CalibratedLinear(
                name,
                weight_of(layer.get_submodule(name)),
                partial(_statistics, name, weight_of(layer.get_submodule(name)), sums[name], of_all.get(name)),
            )
            for name in names
        ]


def _statistics(name: str, weight: Tensor, own: RunningSums, of_all: RunningSums | None) -> Statistics:
    """Return the statistics of the tokens that were routed to a linear layer, or of all tokens if these are given."""
    if of_all is None:
        return replace(own.statistics(name, weight), note=f"on {own.tokens} tokens routed to it")
    return replace(of_all.statistics(name, weight), note=f"on all tokens, {own.tokens} were routed to it")


def _merge(left: RoutedSums, right: RoutedSums) -> RoutedSums:
    return {name: sums.merge(right[name]) for name, sums in left.items()}


def _sums_of_routed(
    layer: nn.Module,
    names: Collection[str],
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    batches: Sequence[int],
) -> RoutedSums:
    sums = {name: RunningSums() for name in names}

    def observe(point: HookPoint, activation: Tensor) -> None:
        if point.side == "input":
            sums[point.module].add(activation, None, {})

    with hooked(layer, names, observe):
        for batch in batches:
            calls[batch](layer, hidden[batch])
    return sums


def _sums_of_all(
    layer: nn.Module,
    names: Sequence[str],
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    batches: Sequence[int],
) -> RoutedSums:
    """Return the sums that experts would have if every token were routed to them."""
    sums = {name: RunningSums() for name in names}
    for batch in batches:
        tokens = _tokens_of_experts(layer, names[0], calls[batch], hidden[batch])
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

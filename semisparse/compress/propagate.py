"""Propagate calibration activations through the decoder layers, while their linear layers are replaced one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall, record_calls
from semisparse.compress.distributed.ranks import Parts, Ranks
from semisparse.compress.hidden_states import empty_states
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.prune import RunningSums
from semisparse.compress.recipe import Recipe
from semisparse.compress.routed import CalibratedLinear, routed_statistics
from semisparse.compress.three_pass import ThreePassLinear
from semisparse.compress.trace import (
    HookPoint,
    Inputs,
    RoutedLayers,
    SharedInput,
    capture,
    capture_all,
    find_inputs,
)
from semisparse.errors import InputError
from semisparse.nn import weight_of


@dataclass
class Activations:
    """The hidden states of this rank's calibration tokens before the current decoder layer.

    Args:
        device: where to compute.
        calls: the arguments of each decoder layer, one call per batch.
        compressed: hidden states in the compressed model, [batch, tokens, features] float32 per batch.
        dense: the same in the dense model; None if nothing is compared with the dense model.
        residual_target: whether pruning, too, compares with the dense model (recipe key ``target=residual``), and not
            only tuning.
        ranks: the processes among which the batches are divided.
        parts: of the sums over all batches, those that this rank computes.
        offload: the directory of hidden states on disk; None if they are in memory.
        seen: for each batch what the linear layers of the current decoder layer read in the dense model, if several
            compressed models share it; else None, and it is computed again for each linear layer.
        last: a mapping to which what the last linear layer reads in the compressed model is written, by batch.
    """

    device: torch.device
    calls: list[list[LayerCall]]
    compressed: MutableSequence[Tensor]
    dense: MutableSequence[Tensor] | None
    residual_target: bool
    ranks: Ranks
    parts: Parts
    offload: Path | None
    seen: Sequence[Mapping[HookPoint, Tensor]] | None = None
    last: dict[int, Mapping[HookPoint, Tensor]] | None = None


def first_activations(
    model: nn.Module,
    layers: Sequence[DecoderLayer],
    batches: Sequence[Tensor],
    recipe: Recipe,
    device: torch.device,
    *,
    ranks: Ranks,
    offload: Path | None,
    shared: bool,
) -> Activations:
    """Compute the activations that enter the first decoder layer, in float32.

    Args:
        model: a transformers causal language model.
        layers: its decoder layers.
        batches: token ids, each [batch, tokens] int64, of all ranks.
        recipe: its `prune`, `target` and `tune` decide whether the dense model's hidden states are needed, too.
        device: where to compute.
        ranks: the processes.
        offload: a directory for hidden states; None to keep them on the device.
        shared: whether this rank holds only its share of the batches; else it holds all, and computes only its share of
            the sums.
    """
    own, parts = ranks.share(batches) if shared else (list(batches), ranks.share_sums(batches))
    residual_target = recipe.prune == "sparsegpt" and recipe.target == "residual"
    compressed = empty_states(offload, device)
    dense = empty_states(offload, device) if residual_target or recipe.tune != "none" else None

    def take(states: Tensor) -> None:
        states = states.to(device, torch.float32)
        compressed.append(states)
        if dense is not None:
            dense.append(states)

    calls = record_calls(model, [layer.module for layer in layers], own, take)
    moved: list[tuple[Tensor, Tensor]] = []
    calls = [[call.to(device, torch.float32, moved) for call in of_layer] for of_layer in calls]
    return Activations(device, calls, compressed, dense, residual_target, ranks, parts, offload)


def inputs_of(layer: DecoderLayer, dense: nn.Module, activations: Activations, index: int) -> Inputs:
    """Return what the linear layers of decoder layer ``index`` read; ``dense`` is its copy on the device."""
    names = {name: layer.full_name(name) for name in layer.patterns}
    calls, hidden = activations.calls[index], activations.compressed
    return activations.ranks.first(lambda: find_inputs(dense, names, calls[0], hidden[0]))  # another may have no batch


def dense_pass(
    dense: nn.Module, inputs: Inputs, activations: Activations, index: int
) -> tuple[list[dict[HookPoint, Tensor]] | None, list[Tensor]]:
    """Run decoder layer ``index`` of the dense model on all batches.

    Returns:
        What the linear layers read, as in `Activations`, None where pruning does not compare with the dense model; and
        the hidden states after the decoder layer, none without hidden states of the dense model.
    """
    if activations.dense is None:
        return None, []
    pairs = zip(activations.calls[index], activations.dense, strict=True)
    captured = [capture_all(dense, inputs, call, hidden) for call, hidden in pairs]
    return [seen for seen, _ in captured] if activations.residual_target else None, [output for _, output in captured]


def linears_with_statistics(
    layer: DecoderLayer,
    dense: nn.Module,
    working: nn.Module,
    activations: Activations,
    index: int,
    known: Inputs | None = None,
) -> Iterator[list[CalibratedLinear]]:
    """Yield a decoder layer's linear layers in call order, those that share an input together.

    The inputs are those in ``working``. The caller writes new weights into ``working`` before it takes the next
    linear layers, so that every input depends on the linear layers already replaced.

    Args:
        layer: the decoder layer, with the linear layers to prune.
        dense: its copy on the activations' device, float32.
        working: another such copy, whose weights the caller replaces.
        activations: before the decoder layer.
        index: of the decoder layer.
        known: what `inputs_of` returns, if that is known.
    """
    calls, hidden = activations.calls[index], activations.compressed
    ranks, parts = activations.ranks, activations.parts
    for inputs in inputs_of(layer, dense, activations, index) if known is None else known:
        if isinstance(inputs, RoutedLayers):
            yield from routed_statistics(working, inputs.linears, calls, hidden, ranks, parts)
            continue
        sums = ranks.sum(parts, partial(_sum_statistics, inputs, working, dense, activations, index), RunningSums.merge)
        weights = {name: weight_of(working.get_submodule(name)) for name in inputs.linears}
        yield [
            CalibratedLinear(name, weight, partial(sums.statistics, name, weight)) for name, weight in weights.items()
        ]


def _sum_statistics(
    shared: SharedInput,
    working: nn.Module,
    dense: nn.Module,
    activations: Activations,
    index: int,
    batches: Sequence[int],
) -> RunningSums:
    sums = RunningSums()
    dense_hidden = activations.dense if activations.residual_target and shared.all_tokens else None
    for batch in batches:
        call = activations.calls[index][batch]
        seen = capture(working, shared, call, activations.compressed[batch])
        if activations.last is not None:
            activations.last[batch] = seen
        if shared.point not in seen:
            continue
        if dense_hidden is None:
            sums.add(seen[shared.point], None, {})
            continue
        known = activations.seen[batch] if activations.seen else None
        wanted = capture(dense, shared, call, dense_hidden[batch]) if known is None else known
        gaps = {name: wanted[point] - seen[point] for name, point in shared.residuals.items()}
        sums.add(seen[shared.point], wanted[shared.point], gaps)
    return sums


def propagate(activations: Activations, index: int, compressed: nn.Module, dense: nn.Module) -> None:
    """Replace the activations before decoder layer ``index`` by those after it.

    Args:
        activations: changed in place.
        index: of the decoder layer.
        compressed: the decoder layer with its final weights, float32.
        dense: the decoder layer with its dense weights, float32.
    """
    for batch, call in enumerate(activations.calls[index]):
        activations.compressed[batch] = call(compressed, activations.compressed[batch])
        if activations.dense is not None:
            activations.dense[batch] = call(dense, activations.dense[batch])


@contextlib.contextmanager
def errors_naming(linear: str) -> Iterator[None]:
    """Put a linear layer's name before the message of an `InputError`."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"layer {linear}: {error}") from error


@contextlib.contextmanager
def float32_matmuls() -> Iterator[None]:
    """Compute float32 matmuls without TF32: a Hessian in TF32 precision is often singular.

    Linear layers on a GPU run in three bfloat16 products, which are accurate enough. Without a GPU nothing is
    intercepted, since interception takes 2 us per call of torch.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with ThreePassLinear() if torch.cuda.is_available() else contextlib.nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(before)

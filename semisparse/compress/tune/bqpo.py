"""BQPO: train the kept weights of a decoder layer so that its outputs match those of the dense decoder layer.

GQSA, section 3.3. The compressed decoder layer runs on the compressed model's hidden states, the dense one on the dense
model's. Without quantisation this is block-wise reconstruction of the kept weights, for any pattern.

With the recipe key ``tune_units=submodules`` attention and MLP are trained one after the other, each to match the
residual stream after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall
from semisparse.compress.trace import HookPoint, Reached, RoutedLayers, SharedInput, hooked
from semisparse.compress.tune.quantised import TrainableScales, add_fake_quantisation, remove_fake_quantisation
from semisparse.compress.tune.training import TuningResult, train
from semisparse.quant.group import GroupScales, stored_groups

SCALE_RATE = 8.0
"""Learning rate of scales and zero points of b bits, as a multiple of the weights' rate over 4^b: the more codes, the
less may each of them move."""

CODE_RATE = 0.4
"""Learning rate of the weights of a linear layer with at most 4 bits, as a fraction of that of others: a code changes
by steps of its own size (docs/experiments/tuning.md)."""

DROPPED_CODE_RATE = 2.0
"""`CODE_RATE` of a layer of whose groups a quarter and more is dropped: the others make up for them (same page)."""


def tune_decoder_layer(
    layer: nn.Module,
    scales: Mapping[str, GroupScales | None],
    calls: Sequence[LayerCall],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    rate: float,
    epochs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TuningResult, dict[str, GroupScales | None]]:
    """Train the non-zero weights of a decoder layer's linear layers, and their scales and zero points, in place.

    The loss of a token is its squared error divided by its squared target, because the next layers normalise each
    token. The plain squared error would be dominated by the few tokens with huge features.

    Args:
        layer: the decoder layer, float32. Its zeros and its other parameters stay as they are.
        scales: the scales and zero points of each linear layer to train, by its name in the decoder layer; None if it
            is not quantised.
        calls: arguments of the decoder layer, one call per batch.
        inputs: hidden states before it, [batch, tokens, features] float32 per batch.
        targets: what the hidden states after it should be, likewise.
        rate: learning rate of a linear layer, as a fraction of the root mean square of its non-zero weights.
        epochs: passes over the batches.
        seed: seed of the random orders of the batches.
        progress: called with (steps done, total steps).
    Returns:
        The result of the training, and the new scales and zero points.
    """

    def loss(index: int) -> Tensor:
        """Return the mean loss per token of batch ``index``."""
        return _relative_error(calls[index](layer, inputs[index]), targets[index])

    return _train_linears(layer, scales, loss, targets, rate, epochs, seed, progress)


@dataclass(frozen=True)
class Submodule:
    """Linear layers of a decoder layer up to one that adds to the residual stream: those of attention, or of the MLP.

    Args:
        linears: their names in the decoder layer, in call order.
        stream: where the residual stream before the addition can be read; None for the last submodule, after which the
            stream is the decoder layer's output.
    """

    linears: tuple[str, ...]
    stream: HookPoint | None

    def after(self, layer: nn.Module, call: LayerCall, hidden: Tensor) -> Tensor:
        """Return the residual stream after the submodule, [tokens, features]; run the decoder layer no further."""
        if self.stream is None:
            return call(layer, hidden).flatten(0, -2)
        end, seen = HookPoint(self.linears[-1], "output"), dict[HookPoint, Tensor]()

        def observe(point: HookPoint, activation: Tensor) -> None:
            seen[point] = activation
            if point == end:
                raise Reached

        with hooked(layer, {self.stream.module, end.module}, observe), contextlib.suppress(Reached):
            call(layer, hidden)
        return seen[self.stream] + seen[end]


def submodules_of(inputs: Iterable[SharedInput | RoutedLayers]) -> list[Submodule]:
    """Divide a decoder layer's linear layers, as `find_inputs` returns them, after each that adds to the stream.

    Where none but the last adds to a stream that can be read, as in layers that run attention and MLP side by side, all
    are one submodule.
    """
    submodules, linears = list[Submodule](), list[str]()
    for shared in inputs:
        linears += shared.linears
        if isinstance(shared, SharedInput) and len(shared.linears) == 1 and shared.residuals:
            submodules.append(Submodule(tuple(linears), shared.residuals[shared.linears[0]]))
            linears = []
    rest = linears or submodules.pop().linears
    return [*submodules, Submodule(tuple(rest), None)]


def tune_submodules(
    layer: nn.Module,
    dense: nn.Module,
    submodules: Sequence[Submodule],
    scales: Mapping[str, GroupScales | None],
    calls: Sequence[LayerCall],
    inputs: Sequence[Tensor],
    dense_inputs: Sequence[Tensor],
    *,
    rate: float,
    epochs: int,
    seed: int,
    new_states: Callable[[], MutableSequence[Tensor]] = list,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TuningResult, dict[str, GroupScales | None]]:
    """Train a decoder layer as `tune_decoder_layer` does, one submodule after another.

    Args:
        layer: the decoder layer, float32.
        dense: the dense one, float32.
        submodules: which linear layers are trained together.
        scales: as for `tune_decoder_layer`.
        calls: likewise.
        inputs: hidden states before the decoder layer in the compressed model, [batch, tokens, features] float32.
        dense_inputs: the same in the dense model.
        rate, epochs, seed: as for `tune_decoder_layer`, for each submodule.
        new_states: returns an empty list for a submodule's targets.
        progress: likewise.
    Returns:
        The sums of the submodules' results, and the new scales and zero points.
    """
    results, tuned_scales = list[TuningResult](), dict[str, GroupScales | None]()
    for number, submodule in enumerate(submodules):
        targets = new_states()
        with torch.no_grad():
            targets.extend(submodule.after(dense, *pair) for pair in zip(calls, dense_inputs, strict=True))

        def loss(index: int, submodule: Submodule = submodule, targets: Sequence[Tensor] = targets) -> Tensor:
            """Return the mean loss per token of batch ``index``."""
            return _relative_error(submodule.after(layer, calls[index], inputs[index]), targets[index])

        def step(done: int, total: int, number: int = number) -> None:
            """Report the steps of all submodules."""
            progress(number * total + done, len(submodules) * total)

        own = {name: scales[name] for name in submodule.linears}
        result, new = _train_linears(layer, own, loss, targets, rate, epochs, seed, step)
        results.append(result)
        tuned_scales |= new
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    total = TuningResult(
        sum(result.before for result in results),
        sum(result.after for result in results),
        sum(result.steps for result in results),
        next((result.failure for result in results if result.failure), None),
        sum(result.seconds for result in results),
        max(peaks, default=None),
    )
    return total, {name: tuned_scales[name] for name in scales}


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over tokens of the squared error divided by the squared target, of [..., features]."""
    return ((output - target).square().sum(-1) / target.square().sum(-1)).mean()


def _train_linears(
    layer: nn.Module,
    scales: Mapping[str, GroupScales | None],
    loss: Callable[[int], Tensor],
    targets: Sequence[Tensor],
    rate: float,
    epochs: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> tuple[TuningResult, dict[str, GroupScales | None]]:
    """Train the non-zero weights, scales and zero points of some linear layers on a loss of batches, in place."""
    token_counts = [target.shape[:-1].numel() for target in targets]
    weight_rates = {name: _weight_rate(layer.get_submodule(name), given) for name, given in scales.items()}
    with trainable_linears(layer, scales, rate, weight_rates) as (param_groups, trained):
        result = train(param_groups, loss, token_counts, epochs=epochs, seed=seed, progress=progress)
    return result, {name: trained[name].group_scales if name in trained else None for name in scales}


@contextlib.contextmanager
def trainable_linears(
    module: nn.Module, scales: Mapping[str, GroupScales | None], rate: float, weight_rates: Mapping[str, float]
) -> Iterator[tuple[list[dict[str, Any]], dict[str, TrainableScales]]]:
    """Make the non-zero weights, scales and zero points of some linear layers trainable, and all else fixed.

    After the block the layers have the weights that were trained, quantised.

    Args:
        module: holds the linear layers, float32.
        scales: the scales and zero points of each linear layer, by its name in ``module``; None if not quantised.
        rate: learning rate, as a fraction of the root mean square of a layer's non-zero weights.
        weight_rates: that of each layer's weights, as a fraction of ``rate``.
    Yields:
        The optimiser's parameter groups, and the scales and zero points of the quantised layers.
    """
    module.requires_grad_(False)
    linears = {name: module.get_submodule(name) for name in scales}
    param_groups = [_weight_group(linears[name], rate * weight_rates[name]) for name in scales]
    trainable = {name: add_fake_quantisation(linears[name], given) for name, given in scales.items() if given}
    param_groups += [each.param_group(SCALE_RATE * rate / 4**each.bits) for each in trainable.values()]
    yield param_groups, trainable
    for name in trainable:
        remove_fake_quantisation(linears[name])
    module.requires_grad_(False)


def _weight_rate(linear: nn.Module, scales: GroupScales | None) -> float:
    """Return the learning rate of a linear layer's weights, as a fraction of the rate that was asked for."""
    if scales is None or scales.bits == 8:
        return 1.0
    stored = stored_groups(linear.get_parameter("weight").detach(), scales.size)
    return DROPPED_CODE_RATE if stored.float().mean() <= 3 / 4 else CODE_RATE


def _weight_group(linear: nn.Module, rate: float) -> dict[str, Any]:
    """Return an optimiser's parameter group for the non-zero weights of a linear layer; the zeros get no gradient."""
    weight = linear.get_parameter("weight")
    kept = weight.detach() != 0
    weight.requires_grad_()
    # AdamW without weight decay does not change a weight whose gradient was always zero: the zeros stay exact.
    weight.register_hook(lambda gradient: gradient * kept)
    return {"params": [weight], "lr": rate * float(weight.detach().norm() / kept.sum().clamp_min(1).sqrt())}

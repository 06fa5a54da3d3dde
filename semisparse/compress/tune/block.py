"""BQPO: train what is left of a block, so that it gives on its own inputs what the dense block gives on the dense ones.

GQSA, section 3.3. Without quantisation it is block-wise reconstruction of the kept weights, for any pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from semisparse.compress.blocks import Call
from semisparse.compress.tune.rounded import end_rounding, round_while_training
from semisparse.compress.tune.training import Trained, train
from semisparse.quant.group import GroupScales

SCALE_RATE = 0.3
"""Learning rate of scales and zero points, as a share of the weights'."""


def tune_block(
    block: nn.Module,
    scales: Mapping[str, GroupScales | None],
    calls: Sequence[Call],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    rate: float,
    epochs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Trained, dict[str, GroupScales | None]]:
    """Train the non-zero weights of some of a block's linear layers, and how they are rounded, in place.

    The loss is a token's square error over the square of its target, because the norms that follow divide by that: a
    plain mean would be that of the few tokens with huge features.

    Args:
        block: in float32; the other parameters stay as they are, and so do the zeros.
        scales: of each layer to train, by its name in the block; None where its weight is not rounded.
        calls: what the model passes to the block, one a batch.
        inputs: hidden states that enter the block, [batch, tokens, features] float32 a batch.
        targets: hidden states that should leave it, likewise.
        rate: the learning rate of a layer, as a share of the root mean square of its non-zero weights.
        epochs: passes over the batches.
        seed: of the order of the batches.
        progress: called with (steps done, all steps).
    Returns:
        what the training did, and the new scales.
    """

    def loss(index: int) -> Tensor:
        output, target = calls[index](block, inputs[index]), targets[index]
        return ((output - target).square().sum(-1) / target.square().sum(-1)).mean()

    tokens = [target.shape[:-1].numel() for target in targets]
    block.requires_grad_(False)
    layers = {name: block.get_submodule(name) for name in scales}
    groups = [_weights(layer, rate) for layer in layers.values()]
    roundings = {name: round_while_training(layers[name], given) for name, given in scales.items() if given}
    groups += [rounding.group(SCALE_RATE * rate) for rounding in roundings.values()]
    trained = train(groups, loss, tokens, epochs=epochs, seed=seed, progress=progress)
    for name in roundings:
        end_rounding(layers[name])
    block.requires_grad_(False)
    return trained, {name: roundings[name].scales if name in roundings else None for name in scales}


def _weights(layer: nn.Module, rate: float) -> dict[str, Any]:
    """Let gradients reach the non-zero weights of a layer, and give them with their learning rate."""
    weight = layer.get_parameter("weight")
    kept = weight.detach() != 0
    weight.requires_grad_()
    # AdamW without decay leaves a weight alone whose gradient was always zero, so the zeros stay exact.
    weight.register_hook(lambda gradient: gradient * kept)
    return {"params": [weight], "lr": rate * float(weight.detach().norm() / kept.sum().clamp_min(1).sqrt())}

"""BQPO: train the kept weights of a decoder layer so that its outputs match those of the dense decoder layer.

GQSA, section 3.3. The compressed decoder layer runs on the compressed model's hidden states, the dense one on the dense
model's. Without quantisation this is block-wise reconstruction of the kept weights, for any pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from semisparse.compress.decoder import LayerCall
from semisparse.compress.tune.quantised import add_fake_quantisation, remove_fake_quantisation
from semisparse.compress.tune.training import TuningResult, train
from semisparse.quant.group import GroupScales

SCALE_RATE = 0.3
"""Learning rate of scales and zero points, as a fraction of that of the weights."""


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
        output, target = calls[index](layer, inputs[index]), targets[index]
        return ((output - target).square().sum(-1) / target.square().sum(-1)).mean()

    token_counts = [target.shape[:-1].numel() for target in targets]
    layer.requires_grad_(False)
    linears = {name: layer.get_submodule(name) for name in scales}
    param_groups = [_weight_group(linear, rate) for linear in linears.values()]
    trainable = {name: add_fake_quantisation(linears[name], given) for name, given in scales.items() if given}
    param_groups += [each.param_group(SCALE_RATE * rate) for each in trainable.values()]
    result = train(param_groups, loss, token_counts, epochs=epochs, seed=seed, progress=progress)
    for name in trainable:
        remove_fake_quantisation(linears[name])
    layer.requires_grad_(False)
    return result, {name: trainable[name].group_scales if name in trainable else None for name in scales}


def _weight_group(linear: nn.Module, rate: float) -> dict[str, Any]:
    """Return an optimiser's parameter group for the non-zero weights of a linear layer; the zeros get no gradient."""
    weight = linear.get_parameter("weight")
    kept = weight.detach() != 0
    weight.requires_grad_()
    # AdamW without weight decay does not change a weight whose gradient was always zero: the zeros stay exact.
    weight.register_hook(lambda gradient: gradient * kept)
    return {"params": [weight], "lr": rate * float(weight.detach().norm() / kept.sum().clamp_min(1).sqrt())}

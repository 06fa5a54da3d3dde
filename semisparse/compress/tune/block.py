"""BQPO: train what is left of a block, so that it gives on its own inputs what the dense block gives on the dense ones.

GQSA, section 3.3. Without quantisation it is block-wise reconstruction of the kept weights, for any pattern.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from semisparse.compress.blocks import Call
from semisparse.compress.tune.training import Trained, train


def tune_block(
    block: nn.Module,
    names: Collection[str],
    calls: Sequence[Call],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    rate: float,
    epochs: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trained:
    """Train the non-zero weights of some of a block's linear layers, in place.

    The loss is a token's square error over the square of its target, because the norms that follow divide by that: a
    plain mean would be that of the few tokens with huge features.

    Args:
        block: in float32; the other parameters stay as they are, and so do the zeros.
        names: of the layers.
        calls: what the model passes to the block, one a batch.
        inputs: hidden states that enter the block, [batch, tokens, features] float32 a batch.
        targets: hidden states that should leave it, likewise.
        rate: the learning rate of a layer, as a share of the root mean square of its non-zero weights.
        epochs: passes over the batches.
        seed: of the order of the batches.
        progress: called with (steps done, all steps).
    """

    def loss(index: int) -> Tensor:
        output, target = calls[index](block, inputs[index]), targets[index]
        return ((output - target).square().sum(-1) / target.square().sum(-1)).mean()

    tokens = [target.shape[:-1].numel() for target in targets]
    with _trainable(block, names) as weights:
        groups = [_group(weight, rate) for weight in weights]
        return train(groups, loss, tokens, epochs=epochs, seed=seed, progress=progress)


def _group(weight: nn.Parameter, rate: float) -> dict[str, Any]:
    return {"params": [weight], "lr": rate * float(weight.norm() / weight.count_nonzero().clamp_min(1).sqrt())}


@contextlib.contextmanager
def _trainable(block: nn.Module, names: Collection[str]) -> Iterator[list[nn.Parameter]]:
    """Let gradients reach the non-zero weights of some layers, and nothing else of the block."""
    block.requires_grad_(False)
    weights = [block.get_submodule(name).get_parameter("weight") for name in names]
    hooks = []
    for weight in weights:
        weight.requires_grad_()
        # AdamW without decay leaves a weight alone whose gradient was always zero, so the zeros stay exact.
        kept = weight.detach() != 0
        hooks.append(weight.register_hook(lambda gradient, kept=kept: gradient * kept))
    try:
        yield weights
    finally:
        for hook in hooks:
            hook.remove()
        block.requires_grad_(False)

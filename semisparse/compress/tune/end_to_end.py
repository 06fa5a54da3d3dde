"""E2E-OQP: train the scales and zero points of a rounded model on the language-model loss, its codes fixed.

GQSA, section 3.4. The device holds a byte a weight, and what one decoder block needs to be computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from semisparse.compress.blocks import decoder_blocks
from semisparse.compress.report import LayerReport
from semisparse.compress.tune.rounded import CodedLinear
from semisparse.compress.tune.training import Trained, train
from semisparse.nn import weight_of

RATE = 0.1
"""Learning rate, as a share of that of the weights in block-wise tuning. On babyllama-1m 0.03 left 2 % more KL."""


def tune_end_to_end(
    model: nn.Module,
    batches: Sequence[Tensor],
    reports: Sequence[LayerReport],
    *,
    rate: float,
    epochs: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> tuple[Trained, list[LayerReport]]:
    """Train every rounded layer's scales and zero points, and put the new weights into the model.

    Args:
        model: a causal language model whose layers are rounded as their reports say.
        batches: token ids, each [batch, tokens] int64.
        reports: of the layers.
        rate: the recipe's; scales are trained at a small share of it.
        epochs: passes over the batches.
        seed: of the order of the batches.
        device: where to compute.
        dtype: of the activations.
        progress: called with (steps done, all steps).
    Returns:
        what the training did, and the reports with the new scales.
    """
    coded = copy.deepcopy(model).to(dtype)
    coded.requires_grad_(False)
    layers = {}
    for report in reports:
        if report.scales:
            linear = coded.get_submodule(report.name)
            layers[report.name] = CodedLinear(linear, report.scales.to(weight_of(linear).device))
            coded.set_submodule(report.name, layers[report.name])
    coded.to(device)
    for block in decoder_blocks(coded)[1]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def loss(index: int) -> Tensor:
        tokens = batches[index].to(device)
        logits = coded(tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    groups = [layer.scales.group(RATE * rate) for layer in layers.values()]
    tokens = [batch.numel() for batch in batches]
    found = train(groups, loss, tokens, epochs=epochs, seed=seed, progress=progress)
    tuned = []
    for report in reports:
        if report.name in layers:
            layer, weight = layers[report.name], weight_of(model.get_submodule(report.name))
            weight.copy_(layer.weight()).add_(0)
            outcome = f"{report.outcome}, e2e {found.outcome}"
            report = replace(report, outcome=outcome, scales=layer.scales.scales)
        tuned.append(report)
    return found, tuned

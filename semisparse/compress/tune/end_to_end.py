"""E2E-OQP: train the scales and zero points of a quantised model on the language-model loss (GQSA, section 3.4).

With the dense model's predictions, the loss is the KL divergence from them instead.

The codes (the quantised integers) and the pruned groups do not change. On the device a quantised weight takes one
byte, its code; activations are checkpointed per decoder layer.
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

from semisparse.compress.decoder import decoder_layers
from semisparse.compress.report import LayerReport
from semisparse.compress.tune.predictions import Predictions
from semisparse.compress.tune.quantised import QuantisedLinear
from semisparse.compress.tune.training import TuningResult, train
from semisparse.nn import weight_of

RELATIVE_RATE = 0.1
"""Learning rate, as a fraction of the recipe's `tune_rate`, which is the rate of the weights in BQPO (bqpo.py). With a
fraction of 0.03 the KL divergence to the dense model is 2 % higher (babyllama-1m)."""


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
    predictions: Sequence[Predictions] | None = None,
) -> tuple[TuningResult, list[LayerReport]]:
    """Train every quantised linear layer's scales and zero points, and write the new weights into the model.

    A deep copy of the model is trained; then the weights of ``model`` are updated in place.

    Args:
        model: a causal language model. A linear layer whose report has scales is quantised with these, and is trained;
            the others stay as they are.
        batches: token ids, each [batch, tokens] int64.
        reports: one per compressed linear layer.
        rate: the recipe's `tune_rate`; the learning rate is `RELATIVE_RATE` times it.
        epochs: passes over the batches.
        seed: seed of the random orders of the batches.
        device: where to compute.
        dtype: dtype of the activations, and of the copy's weights that are not quantised.
        progress: called with (steps done, total steps).
        predictions: the dense model's, for each batch: the loss is the KL divergence from them. None: it is the
            next-token loss.
    Returns:
        The result of the training, and the reports with the new scales.
    """
    quantised = copy.deepcopy(model).to(dtype)
    quantised.requires_grad_(False)
    quantised_linears = {}
    for report in reports:
        if report.scales:
            linear = quantised.get_submodule(report.name)
            quantised_linears[report.name] = QuantisedLinear(linear, report.scales.to(weight_of(linear).device))
            quantised.set_submodule(report.name, quantised_linears[report.name])
    quantised.to(device)
    checkpoint_activations(quantised)

    def loss(index: int) -> Tensor:
        """Return the mean next-token cross-entropy or KL divergence of batch ``index``, in nats."""
        ids = batches[index].to(device)
        logits = quantised(ids, use_cache=False).logits[:, :-1].float()
        if predictions is not None:
            return predictions[index].kl(logits)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    param_groups = [linear.scales.param_group(RELATIVE_RATE * rate) for linear in quantised_linears.values()]
    token_counts = [batch.numel() for batch in batches]
    result = train(param_groups, loss, token_counts, epochs=epochs, seed=seed, progress=progress)
    new_reports = []
    for report in reports:
        if report.name in quantised_linears:
            trained, weight = quantised_linears[report.name], weight_of(model.get_submodule(report.name))
            weight.copy_(trained.weight()).add_(0)  # pruned weights may be -0: adding 0 makes them +0
            outcome = f"{report.outcome}, {'e2e' if predictions is None else 'kl'} {result.outcome}"
            report = replace(report, outcome=outcome, scales=trained.scales.group_scales)
        new_reports.append(report)
    return result, new_reports


def checkpoint_activations(model: nn.Module) -> None:
    """Make each decoder layer of a model compute its activations anew in the backward pass."""
    for layer in decoder_layers(model)[1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

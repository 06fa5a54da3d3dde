"""Train all kept weights of a compressed model, with scales and zero points, on the dense model's predictions.

Knowledge distillation: the loss is the KL divergence from the dense model. The mask stays. Codes are trained through
rounding, as in BQPO.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from semisparse.compress.report import LayerReport, density_of
from semisparse.compress.tune.bqpo import CODE_RATE, trainable_linears
from semisparse.compress.tune.end_to_end import checkpoint_activations
from semisparse.compress.tune.predictions import Predictions
from semisparse.compress.tune.training import TuningResult, train
from semisparse.nn import weight_of

DISTIL_RATE = 0.3
"""Learning rate, as a fraction of that in BQPO; all weights have the rate of quantised ones. With 1 no
step lowers the held-out loss of babyllama-1m."""

PASSES = 2
"""Passes over the calibration text for each that the recipe's `tune_epochs` allows. One leaves a KL that is
5 % higher on babyllama-1m (docs/experiments/tuning.md)."""


def distil(
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
    predictions: Sequence[Predictions],
) -> tuple[TuningResult, list[LayerReport]]:
    """Train a compressed model end to end, and write the new weights into it.

    A float32 copy of the model is trained; then the weights of ``model`` are updated in place.

    Args:
        model: a causal language model.
        batches: token ids, each [batch, tokens] int64.
        reports: one per compressed linear layer; these are trained, the rest of the model stays as it is.
        rate: the recipe's `tune_rate`; the learning rate is `DISTIL_RATE` times it.
        epochs: the recipe's `tune_epochs`.
        seed: seed of the random orders of the batches.
        device: where to compute.
        dtype: of the activations.
        progress: called with (steps done, total steps).
        predictions: the dense model's, for each batch.
    Returns:
        The result of the training, and the reports with the new scales.
    """
    trained = copy.deepcopy(model).to(device, torch.float32)
    checkpoint_activations(trained)
    scales = {report.name: report.scales.to(device) if report.scales else None for report in reports}

    def loss(index: int) -> Tensor:
        """Return the mean KL divergence of batch ``index`` from the dense model's predictions, in nats per token."""
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = trained(batches[index].to(device), use_cache=False).logits[:, :-1]
        return predictions[index].kl(logits.float())

    weight_rates = dict.fromkeys(scales, CODE_RATE)
    with trainable_linears(trained, scales, DISTIL_RATE * rate, weight_rates) as (param_groups, new_scales):
        token_counts = [batch.numel() for batch in batches]
        result = train(param_groups, loss, token_counts, epochs=PASSES * epochs, seed=seed, progress=progress)
    new_reports = []
    for report in reports:
        weight = weight_of(model.get_submodule(report.name))
        weight.copy_(weight_of(trained.get_submodule(report.name))).add_(0)  # pruned weights may be -0: -0 + 0 is +0
        new = new_scales[report.name].group_scales if report.name in new_scales else None
        outcome = f"{report.outcome}, distil {result.outcome}"
        new_reports.append(replace(report, density=density_of(weight), outcome=outcome, scales=new))
    return result, new_reports

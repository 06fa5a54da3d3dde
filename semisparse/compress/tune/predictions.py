"""The dense model's predictions, kept while the model is compressed, and the KL divergence of others from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import copy_to

KEPT = 512
"""Most likely tokens whose probabilities are kept for each position; the probability of all others is kept as one. A
position then takes 3 KB of host memory."""


class Predictions(NamedTuple):
    """The dense model's predictions for one batch.

    Args:
        tokens: [batch, tokens - 1, kept] int32, the most likely next tokens at each position.
        log_probabilities: [batch, tokens - 1, kept] float16, of these.
    """

    tokens: Tensor
    log_probabilities: Tensor

    def kl(self, logits: Tensor) -> Tensor:
        """Return the mean KL divergence of predictions from the dense model's, in nats per token, with gradients.

        The tokens that were not kept count as one token, so the result is at most the divergence over all tokens.

        Args:
            logits: [batch, tokens - 1, vocabulary] float32.
        """
        dense = self.log_probabilities.to(logits.device, torch.float32)
        own = logits.log_softmax(-1)
        kept = own.gather(-1, self.tokens.to(logits.device, torch.int64))
        divergence = (dense.exp() * (dense - kept)).sum(-1)
        if dense.shape[-1] < logits.shape[-1]:
            rest, own_rest = (1 - part.exp().sum(-1) for part in (dense, kept))
            rest, own_rest = rest.clamp_min(1e-6), own_rest.clamp_min(1e-6)
            divergence = divergence + rest * (rest.log() - own_rest.log())
        return divergence.mean()


@torch.no_grad()
def dense_predictions(
    model: nn.Module, batches: Sequence[Tensor], device: torch.device, dtype: torch.dtype
) -> list[Predictions]:
    """Return the model's predictions for each batch, in host memory; a copy of the model runs on ``device``.

    Args:
        model: a causal language model, not compressed yet.
        batches: token ids, each [batch, tokens] int64.
        device: where the copy runs.
        dtype: of the copy.
    """
    dense = copy_to(model, device, dtype).eval()
    result = []
    for batch in batches:
        logits = dense(batch.to(device), use_cache=False).logits[:, :-1].float()
        best = logits.log_softmax(-1).topk(min(KEPT, logits.shape[-1]), dim=-1)
        result.append(Predictions(best.indices.int().cpu(), best.values.half().cpu()))
    return result

"""Loss, perplexity and KL divergence from a baseline, on a text cut into token sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Quality:
    """The quality of a model on a text.

    Args:
        nll: mean negative log-likelihood, in nats per predicted token.
        tokens: number of predicted tokens.
        kl: mean KL(baseline || model), in nats per predicted token; None without a baseline.
    """

    nll: float
    tokens: int
    kl: float | None

    @property
    def perplexity(self) -> float:
        """``exp(nll)``; infinite if that overflows."""
        return math.exp(self.nll) if self.nll < 700 else math.inf


@torch.no_grad()
def measure_quality(
    model: PreTrainedModel,
    chunks: Sequence[Sequence[int]],
    baseline: PreTrainedModel | None = None,
    *,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Measure loss and KL divergence on every token but the first of each chunk.

    Args:
        model: a causal language model.
        chunks: token ids; each chunk has 2 or more.
        baseline: a dense model with the same vocabulary, for the KL divergence.
        batch_tokens: maximum number of tokens per forward pass, with padding; a longer chunk runs alone.
        progress: called with (chunks done, all chunks).
    Returns:
        Means over the predicted tokens; the sums are in float64.
    """
    nll = kl = 0.0
    tokens = done = 0
    for batch in _batches(chunks, batch_tokens):
        ids, mask = _padded(batch, model.device)
        logp = _log_probabilities(model, ids, mask)
        predicted = mask[:, 1:].bool()
        nll += float(-logp.gather(-1, ids[:, 1:, None])[..., 0][predicted].double().sum())
        if baseline is not None:
            reference = _log_probabilities(baseline, ids, mask)
            divergence = F.kl_div(logp, reference, log_target=True, reduction="none").sum(-1)
            kl += float(divergence[predicted].double().sum())
        tokens += int(predicted.sum())
        done += len(batch)
        if progress:
            progress(done, len(chunks))
    return Quality(nll / tokens, tokens, None if baseline is None else kl / tokens)


def _log_probabilities(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities [batch, tokens - 1, vocabulary] float32 of the tokens after the first."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1)


def _batches(chunks: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[Sequence[int]]]:
    """Batch chunks of similar length, the longest first, to keep padding small."""
    batch: list[Sequence[int]] = []
    for chunk in sorted(chunks, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > batch_tokens:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _padded(batch: list[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, [batch, tokens] int64; padded on the right, which a causal model ignores."""
    ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, chunk in enumerate(batch):
        ids[row, : len(chunk)] = torch.tensor(chunk)
        mask[row, : len(chunk)] = 1
    return ids.to(device), mask.to(device)

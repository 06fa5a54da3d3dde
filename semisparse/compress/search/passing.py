"""Score a candidate with the decoder layers that are pruned for it, each while it is on the device.

The device then holds one decoder layer at a time, not the model: `Scorer` in score.py needs the whole model, but scores
many candidates that share most of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import copy_to, decoder_layers, logits_after, record_calls
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.search.score import ScoringBatch, in_turns, scoring_batch


class PassingScorer:
    """Runs batches through the decoder layers of one candidate after another, each given to `pass_through`.

    Args:
        model: the dense model; it is not changed.
        batches: token ids, as `scoring_batches` returns them.
        device: where to compute, in float32.
        ranks: the processes that score. Each makes the same calls in the same order, on its share of the batches.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        self._frame = frame_of(model, device)
        self._modules = list(decoder_layers(self._frame)[1])
        self.tokens = sum(ids.numel() for ids in batches)
        """Tokens that a candidate is scored on, on all ranks, with padding."""
        self._count = sum(int((ids[:, 1:] >= 0).sum()) for ids in batches)
        owners = in_turns([1.0] * len(batches), ranks.count)
        self._padded = [ids.to(device) for ids, owner in zip(batches, owners, strict=True) if owner == ranks.rank]
        self._ids = [ids.clamp_min(0) for ids in self._padded]
        self._entering: list[Tensor] = []
        self._calls = record_calls(self._frame, self._modules, self._ids, self._entering.append)
        self._states: list[list[Tensor]] = []
        self._dense_states: list[Tensor] | None = None
        self._dense: list[ScoringBatch] = []

    def begin(self, candidates: int = 1) -> None:
        """Begin some candidates side by side. The first ones' dense decoder layers run as well."""
        self._states = [list(self._entering) for _ in range(candidates)]
        self._dense_states = None if self._dense else list(self._entering)

    @torch.no_grad()
    def pass_through(self, index: int, dense: nn.Module, pruned: nn.Module, candidate: int = 0) -> None:
        """Run the batches through decoder layer ``index`` of a candidate, on the device in float32.

        With the first candidate they also run through the dense one.
        """
        calls = self._calls[index]
        self._states[candidate] = [
            call(pruned, states) for call, states in zip(calls, self._states[candidate], strict=True)
        ]
        if self._dense_states is not None and candidate == 0:
            self._dense_states = [call(dense, states) for call, states in zip(calls, self._dense_states, strict=True)]

    @torch.no_grad()
    def mean_kl(self, candidate: int = 0) -> float:
        """Return KL(dense || candidate), mean in nats per token, once all decoder layers have passed."""
        if self._dense_states is not None:
            pairs = zip(self._padded, self._logits(self._dense_states), strict=True)
            self._dense, self._dense_states = [scoring_batch(padded, logits) for padded, logits in pairs], None
        scored = zip(self._dense, self._logits(self._states[candidate]), strict=True)
        own = [float(batch.kl_of(logits)) for batch, logits in scored]
        return sum(kl for kls in self._ranks.gather(own) for kl in kls) / self._count

    def _logits(self, states: Sequence[Tensor]) -> list[Tensor]:
        return [
            logits_after(self._frame, self._modules, ids, hidden) for ids, hidden in zip(self._ids, states, strict=True)
        ]


def frame_of(model: nn.Module, device: torch.device) -> nn.Module:
    """Copy all of a model but its decoder layers to a device, in float32.

    The first decoder layer is copied, too: it shows what decoder layers return.
    """
    return copy_to(model, device, torch.float32, shared=list(decoder_layers(model)[1])[1:]).eval()

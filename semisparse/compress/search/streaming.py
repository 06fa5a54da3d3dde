"""Score candidates with one decoder layer at a time on the device, for models that do not fit there in float32.

A decoder layer is copied to the device in the model's dtype, cast there, and given to all candidates that are scored in
one call. The scores are bit by bit those of `Scorer`, which holds the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import copy_to, decoder_layers, logits_after, record_calls
from semisparse.compress.propagate import float32_matmuls
from semisparse.compress.search.masked import to_dense
from semisparse.compress.search.passing import frame_of
from semisparse.compress.search.score import BatchScore, Own, Scored, Scorer, ScoringBatch, scoring_batch
from semisparse.compress.search.space import Candidate
from semisparse.nn import swap_weight, weight_of

KEPT = 4
"""Hidden states of all scored tokens before each decoder layer that a search holds at most: the parent's, and in
``evolution`` those of its offspring on the batches that each is scored on."""

STATES = 1 << 33
"""Bytes of hidden states, of all candidates that pass through the decoder layers together; the others follow."""


class StreamingScorer(Scorer):
    """A `Scorer` that reads decoder layers from the model whenever they run. Its arguments are the same.

    Beside one decoder layer the device holds the embeddings, the head, and the parent's hidden states before each
    decoder layer.
    """

    at_once = 256

    def _begin(self, model: nn.Module, padded: Sequence[Tensor], device: torch.device) -> list[ScoringBatch]:
        self._list_name, self._layers = decoder_layers(model)
        self._frame = frame_of(model, device)
        self._modules = list(decoder_layers(self._frame)[1])
        self._ids = [ids.clamp_min(0) for ids in padded]
        self._entering: list[Tensor] = []
        self._calls = record_calls(self._frame, self._modules, self._ids, self._entering.append)
        states = list(self._entering)
        with torch.no_grad():
            for index, module in enumerate(self._layers):
                layer = copy_to(module, device, torch.float32).eval()
                for batch, call in enumerate(self._calls[index]):
                    states[batch] = call(layer, states[batch])
            return [scoring_batch(ids, self._logits(batch, states[batch])) for batch, ids in enumerate(padded)]

    @float32_matmuls()
    def set_parent(self, candidate: Candidate, scores: list[BatchScore]) -> None:
        first = self._first_changed(candidate)
        missing = [batch for batch, score in enumerate(scores) if not score.states]
        (scored,) = self._score_own([Own(candidate, missing, first)], keep_states=True)
        self._parent_scores = [
            score._replace(states=scored[batch].states) if batch in scored else score
            for batch, score in enumerate(scores)
        ]
        self._parent = candidate

    @torch.no_grad()
    def _score_own(self, wanted: Sequence[Own], keep_states: bool) -> list[dict[int, Scored]]:
        most = max(1, STATES // max(states.nbytes for states in self._entering))
        scored: list[dict[int, Scored]] = []
        while len(scored) < len(wanted):
            together, pairs = list[Own](), 0
            for own in wanted[len(scored) :]:
                pairs += len(own.batches)
                if together and pairs > most:
                    break
                together.append(own)
            scored += self._score_together(together, keep_states)
        return scored

    def _score_together(self, wanted: Sequence[Own], keep_states: bool) -> list[dict[int, Scored]]:
        """Run candidates through the decoder layers, from the first on that one of them needs."""
        kept = [{batch: list(self._parent_states(batch)[: own.first]) for batch in own.batches} for own in wanted]
        now = [{batch: self._state_before(own.first, batch) for batch in own.batches} for own in wanted]
        begin = min((own.first for own in wanted if own.batches), default=len(self._layers))
        for index in range(begin, len(self._layers)):
            layer = self._at_parent(index)
            for own, states, entered in zip(wanted, now, kept, strict=True):
                if own.first > index or not own.batches:
                    continue
                with self._swapped(layer, index, own.candidate):
                    for batch in own.batches:
                        if keep_states:
                            entered[batch].append(states[batch])
                        states[batch] = self._calls[index][batch](layer, states[batch])
        scored: list[dict[int, Scored]] = []
        for states, entered in zip(now, kept, strict=True):
            kls = {batch: self._batches[batch].kl_of(self._logits(batch, state)) for batch, state in states.items()}
            scored.append({batch: Scored(kl, entered[batch] if keep_states else []) for batch, kl in kls.items()})
        return scored

    def _parent_states(self, batch: int) -> Sequence[Tensor]:
        return self._parent_scores[batch].states if self._parent_scores else ()

    def _state_before(self, index: int, batch: int) -> Tensor:
        return self._parent_states(batch)[index] if index else self._entering[batch]

    def _at_parent(self, index: int) -> nn.Module:
        """Return decoder layer ``index`` on the device, with the parent's weights; dense if there is no parent."""
        layer = copy_to(self._layers[index], self._device, torch.float32).eval()
        for number in self._linears_of(index) if self._parent is not None else ():
            assert self._parent is not None
            self._set(layer, number, self._parent[number])
        return layer

    @contextlib.contextmanager
    def _swapped(self, layer: nn.Module, index: int, candidate: Candidate) -> Iterator[None]:
        """While entered, a decoder layer has a candidate's weights."""
        changed = set(self._changed(candidate)).intersection(self._linears_of(index))
        former = [(self._linear(layer, number), self._set(layer, number, candidate[number])) for number in changed]
        yield
        for linear, weight in former:
            swap_weight(linear, weight)

    def _linears_of(self, index: int) -> list[int]:
        return [number for number, linear in enumerate(self._space) if linear.decoder_layer == index]

    def _linear(self, layer: nn.Module, number: int) -> nn.Module:
        linear = self._space[number]
        return layer.get_submodule(linear.name.removeprefix(f"{self._list_name}.{linear.decoder_layer}."))

    def _set(self, layer: nn.Module, number: int, level: int) -> Tensor:
        """Set a linear layer's weight to that of a level, and return the one it had."""
        linear = self._linear(layer, number)
        return swap_weight(linear, to_dense(self._bank[self._space[number].name][level], weight_of(linear)))

    def _logits(self, batch: int, hidden: Tensor) -> Tensor:
        return logits_after(self._frame, self._modules, self._ids[batch], hidden)


def scorer_type(streams: bool) -> type[Scorer]:
    """Return the scorer that reads decoder layers when they run, or the one that holds the whole model."""
    return StreamingScorer if streams else Scorer

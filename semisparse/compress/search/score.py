"""Score candidates by the KL divergence of their predictions from the dense model's.

The parent's hidden states are reused up to the first decoder layer in which a candidate differs from it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.decoder import copy_to, decoder_layers
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.propagate import float32_matmuls
from semisparse.compress.search.bank import Bank, Levels
from semisparse.compress.search.masked import MaskedWeight, to_dense
from semisparse.compress.search.space import Candidate
from semisparse.nn import swap_weight, weight_of

BATCHES = 16
"""Batches that the scored tokens are split into; a candidate may be scored on some of them."""

COMPARED = 2
"""Tokens that the finalists of a search are compared on, as a multiple of those that it scores candidates on."""

HELD = 4
"""Pruned weights that have been scored stay on the GPU, in at most a `HELD`-th of its free memory."""


class BatchScore(NamedTuple):
    """A candidate's score on one batch.

    Args:
        kl: KL(dense || candidate), summed over the predicted positions, in nats.
        states: hidden states that enter each decoder layer, [batch, tokens, features] each; empty if another rank has
            scored it, or if they were not to be kept.
    """

    kl: float
    states: list[Tensor]


class Scored(NamedTuple):
    """A `BatchScore` whose `kl` is still on the device."""

    kl: Tensor
    states: list[Tensor]


class Own(NamedTuple):
    """What a rank scores of a candidate.

    Args:
        candidate: the candidate.
        batches: their indices; may be empty.
        first: the first decoder layer in which the candidate differs from the parent; 0 without a parent.
    """

    candidate: Candidate
    batches: Sequence[int]
    first: int


Wanted = Sequence[tuple[Candidate, Sequence[int]]]
"""Candidates, each with the indices of the batches that it is to be scored on."""


class ScoringBatch(NamedTuple):
    """A batch that candidates are scored on.

    Args:
        ids: [batch, tokens] int64, padded on the right, which a causal model ignores.
        predicted: [predicted positions] int64, the positions at which a token is predicted, of batch * (tokens - 1).
        dense: [predicted positions, vocabulary] float32, the dense model's probabilities.
        entropy: entropy of these probabilities, summed over the positions, in nats.
    """

    ids: Tensor
    predicted: Tensor
    dense: Tensor
    entropy: float

    def kl_of(self, logits: Tensor) -> Tensor:
        """Return KL(dense || candidate), summed over the predicted positions, in nats: a float64 scalar on the device.

        Args:
            logits: the candidate's, [batch, tokens, vocabulary].
        """
        logits = logits[:, :-1].flatten(0, 1)[self.predicted].float()
        # KL = sum of p (log p - log q) with log q = logits - logsumexp(logits); p sums to 1 at each position.
        cross_entropy = logits.logsumexp(-1) - torch.linalg.vecdot(self.dense, logits)
        return cross_entropy.sum(dtype=torch.float64) - self.entropy


def scoring_batch(padded: Tensor, logits: Tensor) -> ScoringBatch:
    """Return a batch, given its ids, padded with -1, and the dense model's logits, [batch, tokens, vocabulary]."""
    predicted = (padded[:, 1:] >= 0).flatten().nonzero().squeeze(1)
    logp = logits[:, :-1].flatten(0, 1)[predicted].float().log_softmax(-1)
    dense = logp.exp()
    return ScoringBatch(padded.clamp_min(0), predicted, dense, -float((dense * logp).sum(dtype=torch.float64)))


def scoring_batches(batches: Sequence[Tensor], tokens: int, seed: int, parts: int = BATCHES) -> list[Tensor]:
    """Draw sequences until they hold ``tokens`` tokens, and distribute them over ``parts`` batches.

    Args:
        batches: token ids, each [batch, tokens] int64.
        tokens: number of tokens to score; all are scored if there are fewer.
        seed: seed of the random draw.
        parts: maximum number of batches; there is no batch without a sequence.
    Returns:
        Token ids, [batch, tokens] int64 per batch, padded on the right with -1.
    """
    return padded_batches(_holding(_shuffled(batches, seed), tokens), parts)


def split_sequences(batches: Sequence[Tensor], tokens: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Draw sequences to score candidates on, and others to compare a search's finalists on.

    The search has selected its result by the errors on its own sequences, so these would favour it.

    Args:
        batches: token ids, each [batch, tokens] int64.
        tokens: number of tokens for the search; it gets a third of all tokens if they are fewer than three times as
            many.
        seed: seed of the random draw.
    Returns:
        The search's sequences, the same as those of `scoring_batches`; `COMPARED` times as many tokens in others, or
        all others. There are no others if there is a single sequence.
    """
    sequences = _shuffled(batches, seed)
    third = sum(map(len, sequences)) // (1 + COMPARED)
    searched = _holding(sequences[:-1] or sequences, max(1, min(tokens, third)))
    return searched, _holding(sequences[len(searched) :], COMPARED * tokens)


def padded_batches(sequences: Sequence[Tensor], parts: int = BATCHES) -> list[Tensor]:
    """Distribute sequences over at most ``parts`` batches, padded on the right with -1, [batch, tokens] int64 each."""
    split = [sequences[start::parts] for start in range(min(parts, len(sequences)))]
    return [nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1) for rows in split]


def _shuffled(batches: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return the sequences of all batches in random order."""
    sequences = [row for batch in batches for row in batch]
    random.Random(seed).shuffle(sequences)
    return sequences


def _holding(sequences: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return the first sequences, as many as hold ``tokens`` tokens; all if they hold fewer."""
    before = accumulate(map(len, sequences), initial=0)
    return [sequence for sequence, total in zip(sequences, before, strict=False) if total < tokens]


def in_turns(costs: Sequence[float], count: int) -> Iterator[int]:
    """Yield the rank of each item: each rank has consecutive items, and all ranks nearly the same total cost."""
    total, before = sum(costs), 0.0
    for cost in costs:
        yield min(count - 1, int((before + cost / 2) * count / total))
        before += cost


def _read(scored: Sequence[dict[int, Scored]]) -> list[dict[int, BatchScore]]:
    """Copy all KL divergences to the host, after waiting for the device once."""
    kls = [score.kl for of_candidate in scored for score in of_candidate.values()]
    floats = iter(torch.stack(kls).tolist() if kls else [])
    return [{index: BatchScore(next(floats), score.states) for index, score in one.items()} for one in scored]


class Scorer:
    """Scores candidates on a copy of the model, whose weights it swaps for those of the bank.

    The copy holds the weights of one candidate, the parent. Its hidden states before each decoder layer are kept.
    Another candidate is scored by swapping the linear layers in which it differs, and running the model from the first
    decoder layer that changes.

    Args:
        model: the dense model; it is not changed.
        space: its linear layers.
        bank: their pruned weights by level.
        batches: token ids, as `scoring_batches` returns them.
        device: where to compute, in float32.
        ranks: the processes that score; each has a scorer, and makes the same calls in the same order.
    """

    @float32_matmuls()
    def __init__(
        self,
        model: nn.Module,
        space: Sequence[Levels],
        bank: Bank,
        batches: Sequence[Tensor],
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._ranks, self._space, self._bank = ranks, space, bank
        self._parent: Candidate | None = None
        self._parent_scores: list[BatchScore] = []
        self.tokens_run = 0
        """Tokens that `score_all` has run so far, on all ranks, with padding; the passes of the dense model and of
        `set_parent` are not counted. Tokens that skip some decoder layers count in full."""
        self._device, self._room = device, 0
        self._held: dict[tuple[str, int], MaskedWeight] = {}
        self._batches = self._begin(model, [ids.to(device) for ids in batches], device)

    def _begin(self, model: nn.Module, padded: Sequence[Tensor], device: torch.device) -> list[ScoringBatch]:
        """Copy the model; return the batches, with the dense model's predictions."""
        self._model = copy_to(model, device, torch.float32).eval()
        self._layers = decoder_layers(self._model)[1]
        self._linears = [self._model.get_submodule(linear.name) for linear in self._space]
        self._returns_tuple = False
        self._room = torch.cuda.mem_get_info(device)[0] // HELD if device.type == "cuda" else 0
        return [self._score_dense(ids) for ids in padded]

    at_once = 1
    """Candidates that `score_all` should get in one call, at least, for speed."""

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def mean_kl(self, scores: Sequence[BatchScore]) -> float:
        """Return the mean KL divergence, in nats per token, of scores on all batches."""
        return sum(score.kl for score in scores) / sum(len(batch.predicted) for batch in self._batches)

    def score(self, candidate: Candidate, batches: Sequence[int]) -> list[BatchScore]:
        """Score a candidate on some batches, given by their indices."""
        return self.score_all([(candidate, batches)])[0]

    @float32_matmuls()
    def score_all(self, wanted: Wanted, keep_states: bool = True) -> list[list[BatchScore]]:
        """Score candidates, each on some batches. The ranks divide the pairs of candidate and batch by cost."""
        firsts = [self._first_changed(candidate) for candidate, _ in wanted]
        costs = [len(self._layers) - first for first, (_, batches) in zip(firsts, wanted, strict=True) for _ in batches]
        owners = in_turns(costs, self._ranks.count)
        mine = [[index for index in batches if next(owners) == self._ranks.rank] for _, batches in wanted]
        candidates = [candidate for candidate, _ in wanted]
        own = _read(self._score_own(list(map(Own, candidates, mine, firsts)), keep_states))
        self.tokens_run += sum(self._batches[index].ids.numel() for _, batches in wanted for index in batches)
        known = self._ranks.gather([{index: score.kl for index, score in scores.items()} for scores in own])
        kls = [
            {index: kl for of_rank in known for index, kl in of_rank[number].items()} for number in range(len(wanted))
        ]
        return [
            [own[number].get(index) or BatchScore(kls[number][index], []) for index in batches]
            for number, (_, batches) in enumerate(wanted)
        ]

    @float32_matmuls()
    def set_parent(self, candidate: Candidate, scores: list[BatchScore]) -> None:
        """Make a candidate the parent; ``scores`` are its scores on all batches, in order."""
        first = self._first_changed(candidate)
        for index in self._changed(candidate):
            self._swap(index, candidate[index])
        # Batches that another rank has scored run here again: computing hidden states is faster than sending them.
        self._parent_scores = [
            score if score.states else score._replace(states=self._score_batch(index, first).states)
            for index, score in enumerate(scores)
        ]
        self._parent = candidate

    def _score_own(self, wanted: Sequence[Own], keep_states: bool) -> list[dict[int, Scored]]:
        """Score candidates on this rank."""
        return [self._score_one(*own, keep_states) if own.batches else {} for own in wanted]

    def _score_one(
        self, candidate: Candidate, batches: Sequence[int], first: int, keep_states: bool
    ) -> dict[int, Scored]:
        """Score a candidate; ``first`` is the first decoder layer in which it differs from the parent."""
        changed = self._changed(candidate)
        parents = [self._swap(index, candidate[index]) for index in changed]
        try:
            scores = ((index, self._score_batch(index, first)) for index in batches)
            return {index: score if keep_states else score._replace(states=[]) for index, score in scores}
        finally:
            for index, weight in zip(changed, parents, strict=True):
                swap_weight(self._linears[index], weight)

    def _first_changed(self, candidate: Candidate) -> int:
        """Return the first decoder layer in which a candidate differs from the parent; 0 if it does not."""
        if self._parent is None:
            return 0
        return min((self._space[index].decoder_layer for index in self._changed(candidate)), default=0)

    def _changed(self, candidate: Candidate) -> list[int]:
        """List the linear layers in which a candidate differs from the parent; all if there is no parent yet."""
        return [i for i, level in enumerate(candidate) if self._parent is None or self._parent[i] != level]

    def _swap(self, index: int, level: int) -> Tensor:
        """Set a linear layer's weight to that of a level, and return the one it had."""
        linear = self._linears[index]
        return swap_weight(linear, to_dense(self._on_device(self._space[index].name, level), weight_of(linear)))

    def _on_device(self, name: str, level: int) -> MaskedWeight:
        """Return a linear layer's weight at a level, which stays on a GPU as long as there is room."""
        masked = self._held.get((name, level)) or self._bank[name][level]
        if self._room >= masked.nbytes and not masked.values.is_cuda:
            masked = self._held[name, level] = masked.to(self._device)
            self._room -= masked.nbytes
        return masked

    @torch.no_grad()
    def _score_batch(self, index: int, first: int) -> Scored:
        """Score the present weights on a batch, running the decoder layers from ``first`` on."""
        batch = self._batches[index]
        skipped = self._parent_scores[index].states[: first + 1] if first else []
        logits, states = self._forward(batch.ids, skipped)
        return Scored(batch.kl_of(logits), states)

    @torch.no_grad()
    def _score_dense(self, padded: Tensor) -> ScoringBatch:
        """Compute the dense model's predictions, once for the whole search."""
        return scoring_batch(padded, self._forward(padded.clamp_min(0), [])[0])

    def _forward(self, ids: Tensor, skipped: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run the model without its first decoder layers.

        Args:
            ids: [batch, tokens] int64.
            skipped: hidden states that enter each skipped decoder layer and the first one that runs; empty to run all.
        Returns:
            Logits, [batch, tokens, vocabulary]; the hidden states that enter each decoder layer.
        """
        states = list(skipped[:-1])
        with self._skipping(skipped, states):
            return self._model(ids, use_cache=False).logits, states

    @contextlib.contextmanager
    def _skipping(self, skipped: Sequence[Tensor], states: list[Tensor]) -> Iterator[None]:
        """Make the first decoder layers return the last of ``skipped``; append the others' inputs to ``states``."""
        left_out = self._layers[: max(0, len(skipped) - 1)]

        def skip(*_: Any, **__: Any) -> Any:
            return (skipped[-1],) if self._returns_tuple else skipped[-1]

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._returns_tuple = isinstance(output, tuple)

        run = self._layers[len(left_out) :]
        handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in run]
        handles.append(run[-1].register_forward_hook(leave))
        for layer in left_out:
            layer.forward = skip
        try:
            yield
        finally:
            for layer in left_out:
                del layer.forward
            for handle in handles:
                handle.remove()

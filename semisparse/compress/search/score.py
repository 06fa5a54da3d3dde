"""How far a candidate is from the dense model: KL divergence of their predictions, unchanged first blocks skipped."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from semisparse.compress.blocks import decoder_blocks
from semisparse.compress.search.bank import Bank, expand
from semisparse.compress.search.space import Choice, Levels
from semisparse.nn import swap_weight, weight_of

PARTS = 16
"""Parts that the tokens are scored in; what is scored on fewer is scored on some of these."""


class Part(NamedTuple):
    """Some of the tokens that candidates are scored on.

    Args:
        ids: [batch, tokens] int64, padded on the right, where a causal model cannot see it.
        predicted: [batch, tokens - 1] bool, whether a position predicts a token.
        dense: [predicted positions, vocabulary] float32, the dense model's probabilities.
        entropy: of these, summed over the positions, in nats.
    """

    ids: Tensor
    predicted: Tensor
    dense: Tensor
    entropy: float


class Run(NamedTuple):
    """A candidate run on one part.

    Args:
        kl: KL(dense || candidate) summed over the predicted positions, in nats.
        states: hidden states that enter each block, [batch, tokens, features] each.
    """

    kl: float
    states: list[Tensor]


def cut_parts(batches: Sequence[Tensor], tokens: int, seed: int) -> list[Tensor]:
    """Draw sequences until they hold so many tokens, and deal them into parts.

    Args:
        batches: token ids, each [batch, tokens] int64.
        tokens: to score; all there are if those are fewer.
    Returns:
        for each part its sequences, padded on the right with -1: [batch, tokens] int64.
    """
    sequences = [row for batch in batches for row in batch]
    random.Random(seed).shuffle(sequences)
    total, drawn = 0, []
    for sequence in sequences:
        if total >= tokens:
            break
        drawn.append(sequence)
        total += len(sequence)
    parts = [drawn[start::PARTS] for start in range(min(PARTS, len(drawn)))]
    return [nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-1) for part in parts]


class Scorer:
    """Scores candidates on a copy of the model, whose weights it swaps for those of the bank.

    One candidate, the parent, stays assembled, with the hidden states that enter each block; another is scored by
    swapping the layers in which it differs and running the blocks from the first of them on.

    Args:
        model: the dense model; it stays as it is.
        choices: of its layers.
        bank: their weights.
        parts: as `cut_parts` gives them.
        device: where to compute, in float32.
    """

    def __init__(
        self, model: nn.Module, choices: Sequence[Choice], bank: Bank, parts: Sequence[Tensor], device: torch.device
    ) -> None:
        self._model = copy.deepcopy(model).to(device, torch.float32).eval()
        self._blocks = decoder_blocks(self._model)[1]
        self._choices = choices
        self._layers = [self._model.get_submodule(choice.name) for choice in choices]
        self._bank = bank
        self._gives_tuples = False
        self._parts = [self._with_dense(ids.to(device)) for ids in parts]
        self._parent: Levels | None = None
        self._parent_runs: list[Run] = []
        self.tokens_run = 0
        """Tokens that candidates were run on so far, padding included; a skipped block does not count less."""

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    def mean_kl(self, runs: Sequence[Run]) -> float:
        """Give the mean KL of runs on all parts, in nats a token."""
        return sum(run.kl for run in runs) / sum(int(part.predicted.sum()) for part in self._parts)

    def run(self, levels: Levels, parts: Sequence[int]) -> list[Run]:
        """Run a candidate on some parts, by their number."""
        changed = self._changed(levels)
        first = 0 if self._parent is None else min((self._choices[i].block for i in changed), default=0)
        parents = [self._swap(index, levels[index]) for index in changed]
        try:
            return [self._run_part(number, first) for number in parts]
        finally:
            for index, weight in zip(changed, parents, strict=True):
                swap_weight(self._layers[index], weight)

    def adopt(self, levels: Levels, runs: list[Run]) -> None:
        """Make a candidate the parent, `runs` being its runs on all parts, in order."""
        for index in self._changed(levels):
            self._swap(index, levels[index])
        self._parent, self._parent_runs = levels, runs

    def _changed(self, levels: Levels) -> list[int]:
        """List the layers in which a candidate is not what is assembled; at first that is the dense model."""
        return [i for i, level in enumerate(levels) if self._parent is None or self._parent[i] != level]

    def _swap(self, index: int, level: int) -> Tensor:
        layer = self._layers[index]
        return swap_weight(layer, expand(self._bank[self._choices[index].name][level], weight_of(layer)))

    @torch.no_grad()
    def _run_part(self, number: int, first: int) -> Run:
        part = self._parts[number]
        skipped = self._parent_runs[number].states[: first + 1] if first else []
        logits, states = self._forward(part.ids, skipped)
        logits = logits[:, :-1][part.predicted].float()
        # The sum of p (log p - log q), where log q = logits - logsumexp(logits) and p sums to 1 at each position.
        cross_entropy = logits.logsumexp(-1) - torch.linalg.vecdot(part.dense, logits)
        self.tokens_run += part.ids.numel()
        return Run(float(cross_entropy.sum(dtype=torch.float64)) - part.entropy, states)

    @torch.no_grad()
    def _with_dense(self, padded: Tensor) -> Part:
        """Score a part with the dense model, once for the whole search."""
        ids = padded.clamp_min(0)
        predicted = padded[:, 1:] >= 0
        logp = self._forward(ids, [])[0][:, :-1][predicted].float().log_softmax(-1)
        dense = logp.exp()
        return Part(ids, predicted, dense, -float((dense * logp).sum(dtype=torch.float64)))

    def _forward(self, ids: Tensor, skipped: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Run the model, its first blocks left out.

        Args:
            ids: [batch, tokens] int64.
            skipped: the states that enter each block left out and the first one run; nothing to run them all.
        Returns:
            logits, [batch, tokens, vocabulary]; the states that enter each block.
        """
        states = list(skipped[:-1])
        with self._watching(skipped, states):
            return self._model(ids, use_cache=False).logits, states

    @contextlib.contextmanager
    def _watching(self, skipped: Sequence[Tensor], states: list[Tensor]) -> Iterator[None]:
        """Let the first blocks give the skipped states, and the others note theirs."""
        left_out = self._blocks[: max(0, len(skipped) - 1)]

        def skip(*_: Any, **__: Any) -> Any:
            return (skipped[-1],) if self._gives_tuples else skipped[-1]

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(args[0] if args else kwargs["hidden_states"])

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._gives_tuples = isinstance(output, tuple)

        run = self._blocks[len(left_out) :]
        handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in run]
        handles.append(run[-1].register_forward_hook(leave))
        for block in left_out:
            block.forward = skip
        try:
            yield
        finally:
            for block in left_out:
                del block.forward
            for handle in handles:
                handle.remove()

"""Candidates of ``search=profile``: the whole model is pruned to each, scored, and kept if it is the best so far.

Where no weights are kept, candidates that do not depend on each other are pruned side by side (together.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.layers import DecoderLayer
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.bank import build_bank, prune_densities
from semisparse.compress.search.masked import MaskedWeight, masked_from_json, masked_to_json
from semisparse.compress.search.passing import PassingScorer
from semisparse.compress.search.space import Candidate, LinearSpace
from semisparse.compress.search.together import prune_side_by_side

TOGETHER = 5
"""Candidates that are pruned side by side, at most. An interrupted run repeats those that it was in."""


@dataclass(frozen=True)
class Evaluation:
    """A candidate that was pruned and scored.

    Args:
        candidate: the level of each linear layer.
        kl: KL(dense || candidate), mean in nats per token.
        weights: the pruned weights by module name; empty unless this is the best candidate so far, and they are kept.
        tokens: number of tokens run through the model to score it.
    """

    candidate: Candidate
    kl: float
    weights: dict[str, MaskedWeight]
    tokens: int


class PrunedAnew:
    """Prunes a model to one candidate after another, each on the activations of its own layers.

    Args:
        model: the dense model; it is not changed.
        layers: its decoder layers.
        space: the levels of their linear layers.
        batches: calibration token ids, each [batch, tokens] int64.
        token_batches: token ids that candidates are scored on, as `scoring_batches` returns them.
        recipe: how to prune.
        device: where to compute, in float32.
        most: candidates, at most.
        progress: called before each decoder layer, with the decoder layers of all candidates.
        journal: stores evaluations, and provides those of an interrupted run.
        ranks: the processes that search; each has such an object, and makes the same calls in the same order.
        offload: a directory for hidden states, as in `compress_decoder_layers`.
        keep: whether the best candidate's weights are needed. If not, no weights are stored, and an interrupted run
            repeats the candidates that it was in from the first decoder layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[DecoderLayer],
        space: Sequence[LinearSpace],
        batches: Sequence[Tensor],
        token_batches: Sequence[Tensor],
        recipe: Recipe,
        device: torch.device,
        most: int,
        progress: Progress,
        journal: Journal | None,
        ranks: Ranks,
        offload: Path | None,
        keep: bool,
    ) -> None:
        self._space, self._journal, self._keep = space, journal, keep
        self._most, self._progress = most, progress
        how: dict[str, Any] = {
            "batches": batches,
            "recipe": recipe,
            "device": device,
            "ranks": ranks,
            "offload": offload,
        }
        self._build_bank = partial(build_bank, model, layers, journal=journal, prune=prune_densities, **how)
        self._prune_side_by_side = partial(prune_side_by_side, model, layers, **how)
        self._scorer = PassingScorer(model, token_batches, device, ranks)
        self.evaluations: list[Evaluation] = []
        """All evaluations so far, in order."""

    @property
    def best(self) -> Evaluation:
        """The evaluation with the lowest KL, the first of equal ones."""
        return min(self.evaluations, key=lambda evaluation: evaluation.kl)

    def kls_of(self, candidates: Sequence[Candidate]) -> list[float]:
        """Prune and score candidates; return the KL of each, in nats per token.

        Raises:
            InputError: a weight or its inputs cannot be used.
        """
        first = number = len(self.evaluations)
        last = first + len(candidates)
        while number < last:
            finished = self._journal.load("pass", number) if self._journal else None
            some = candidates[number - first :][: 1 if finished or self._keep else TOGETHER]
            if finished:
                evaluations = [_read(some[0], *finished)]
            else:
                evaluations = [self._evaluate(some[0], number)] if self._keep else self._evaluate_together(some, number)
            for evaluation in evaluations:
                if not finished:
                    self._save(number, evaluation)
                self._append(evaluation)
                number += 1
        return [evaluation.kl for evaluation in self.evaluations[first:]]

    def _append(self, evaluation: Evaluation) -> None:
        if evaluation.weights:  # it is the best so far: the former best's are not needed
            for earlier, other in enumerate(self.evaluations):
                if other.weights:
                    self.evaluations[earlier] = replace(other, weights={})
                    self._save(earlier, self.evaluations[earlier])
        self.evaluations.append(evaluation)

    def _save(self, number: int, evaluation: Evaluation) -> None:
        if not self._journal:
            return
        tensors: dict[str, Tensor] = {}
        layers = [masked_to_json(masked, tensors, name) for name, masked in evaluation.weights.items()]
        notes = {"kl": evaluation.kl, "tokens": evaluation.tokens, "layers": layers}
        self._journal.save("pass", number, tensors, notes)

    def _report(self, first: int, count: int, done: int, total: int) -> None:
        """Report decoder layers, ``done`` of ``total`` of ``count`` candidates; others are finished."""
        each = total // count
        self._progress("search: pruning the model to candidates", first * each + done, self._most * each)

    def _evaluate_together(self, candidates: Sequence[Candidate], first: int) -> list[Evaluation]:
        """Evaluate candidates side by side, without their weights."""
        pairs = (zip(self._space, candidate, strict=True) for candidate in candidates)
        self._scorer.begin(len(candidates))
        self._prune_side_by_side(
            candidates=[{linear.name: linear.patterns[level] for linear, level in each} for each in pairs],
            progress=partial(self._report, first, len(candidates)),
            on_layer=lambda number, index, dense, pruned: self._scorer.pass_through(index, dense, pruned, number),
        )
        kls = [self._scorer.mean_kl(number) for number in range(len(candidates))]
        return [Evaluation(*each, {}, self._scorer.tokens) for each in zip(candidates, kls, strict=True)]

    def _evaluate(self, candidate: Candidate, number: int) -> Evaluation:
        """Evaluate a candidate, with its weights if it is the best so far."""
        levels = [linear.restricted_to(level, 0, 0) for linear, level in zip(self._space, candidate, strict=True)]
        self._scorer.begin()
        bank = self._build_bank(
            space=levels,
            centre=candidate,
            centre_weights={},
            number=number,
            progress=lambda stage, done, total: self._report(number, 1, done, total),
            on_layer=self._scorer.pass_through,
        )
        kl = self._scorer.mean_kl()
        if kl >= min((evaluation.kl for evaluation in self.evaluations), default=math.inf):
            return Evaluation(candidate, kl, {}, self._scorer.tokens)
        weights = {linear.name: bank[linear.name][level] for linear, level in zip(levels, candidate, strict=True)}
        return Evaluation(candidate, kl, weights, self._scorer.tokens)


def _read(candidate: Candidate, tensors: dict[str, Tensor], notes: dict[str, Any]) -> Evaluation:
    weights = {layer["name"]: masked_from_json(layer, tensors, layer["name"]) for layer in notes["layers"]}
    return Evaluation(candidate, notes["kl"], weights, notes["tokens"])

"""What each choice of each unit loses: units, their compressed weights and their measured KL divergences.

A unit is the linear layers that share an input and get one choice, or a single linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.choice import Choice
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.bank import Bank, build_bank
from semisparse.compress.search.costs import Assignment, UnitCosts
from semisparse.compress.search.dominated import dominated
from semisparse.compress.search.masked import MaskedWeight
from semisparse.compress.search.score import COMPARED, BatchScore, Scorer, padded_batches, split_sequences
from semisparse.compress.search.streaming import scorer_type
from semisparse.compress.search.units import LinearChoices, OptionsOf, compress_every_way, find_units
from semisparse.nn import weight_of
from semisparse.patterns import parse_pattern

SCORED_BATCHES = 4
"""Batches that the scored tokens are split into on a CPU; proposals are first scored on one of them. On a GPU there is
one, because a batch takes the time of its launches: scoring took 70 of 150 s of a search of pycode-11m."""

DOMINATED = 1.1
"""A choice is dropped if another one costs no more in any unit and, in all layers, has a KL lower by this factor."""

UNDERCUT = 1.25
"""A choice is not measured at all if another one costs no more in any unit, and has an output error lower by this
factor in each of `PROBED` linear layers."""

PROBED = 2
"""The smallest linear layers of the first decoder layer, in which output errors are compared before the search."""


class ChoiceLosses:
    """Units, the bank of their compressed weights, a scorer and the measured losses.

    Args:
        model: a transformers causal language model; it is not changed.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune; `search_tokens`.
        options: what a unit may become, and what it costs.
        seed: seed of everything drawn at random.
        device: where to compute, in float32.
        progress: called with (stage, steps done, total steps).
        journal: stores finished work.
        ranks: the processes that search; by default this one.
        offload: a directory for hidden states, as in `compress_decoder_layers`.
        streams: as in `search_patterns`.

    Raises:
        InputError: the model, a weight or the batches cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Tensor],
        recipe: Recipe,
        options: OptionsOf,
        *,
        seed: int,
        device: torch.device | str,
        progress: Progress,
        journal: Journal | None,
        ranks: Ranks | None = None,
        offload: Path | None = None,
        streams: bool = False,
    ) -> None:
        check_batches(model, batches)
        model.eval()
        self._model = model
        self._device, self._progress, self._journal = torch.device(device), progress, journal
        self._ranks = ranks or Ranks()
        self._scorer_type = scorer_type(streams)
        self._layers = layers = list_decoder_layers(model, recipe, {})
        self._recipe = replace(recipe, tune="none")  # a bank is not tuned, so that it needs no targets for that
        self._build_bank = partial(
            build_bank,
            model,
            batches=batches,
            device=self._device,
            progress=progress,
            prune=compress_every_way,
            ranks=self._ranks,
            offload=offload,
        )
        self.units = self._ranks.first(
            lambda: find_units(model, layers, batches, options, each_alone=recipe.chooses_each_linear)
        )
        self._space = [
            LinearChoices(
                name,
                unit.decoder_layer,
                tuple(option.choice for option in unit.options),
                frozenset(range(len(unit.options))),
            )
            for unit in self.units
            for name in unit.linears
        ]
        self.costs = UnitCosts(self.units)
        self._parts = 1 if self._device.type == "cuda" else SCORED_BATCHES
        searched, self.others = split_sequences(batches, recipe.search_tokens, seed)
        """Calibration sequences that no candidate is scored on, to compare results on, [tokens] int64 each."""
        self._token_batches = padded_batches(searched, self._parts)
        self._bank: Bank = {}
        self._scorer: Scorer | None = None
        self.losses: list[list[float]] = []
        """What each option of each unit alone changes, [units][options]; infinite where it was not measured."""
        self.uniform_kl: dict[Choice, float] = {}
        """The KL of each choice in all layers, in the first bank."""
        self._kl: dict[Assignment, float] = {}
        self._number = 0
        self.evaluations = self._tokens = 0

    def measure(self, centre: Assignment) -> None:
        """Compress every layer in every way, and measure what each option of each unit alone changes.

        Args:
            centre: the options of the other units while a layer is compressed and its options are measured. Weights
                are compressed to compensate the errors of the layers before them at the centre. They fit candidates far
                from it less. With a centre of 4 bits in all layers, the best option of one unit in an otherwise dense
                model had a KL divergence of 2.3 on stories260k.
        """
        number, self._number = self._number, self._number + 1
        self._release_scorer()
        self._bank = self._compress(self._space, centre, number)
        self._scorer = self._scorer_of(self._space, self._bank, self._token_batches)
        self._kl = {}
        scores = self._score_whole(centre)
        self._scorer.set_parent(self._levels(centre), scores)
        if number == 0:
            self._drop_dominated()
        saved = self.load("losses", number)
        if saved:
            self.losses = saved["losses"]
            return
        base, self.losses = self.kl(centre), []
        # Nothing is better than the dense model: rounding errors of the sums must not make 8 bits look so.
        least = 0.0 if centre == self.costs.dense else -math.inf
        wanted = {linear.name: linear.wanted for linear in self._space}
        known = 0
        for index, unit in enumerate(self.units):
            self._progress("measuring what each choice loses", index, len(self.units))
            options = wanted[unit.linears[0]]
            if index == known:
                together = list[Assignment]()
                while known < len(self.units) and len(together) < self._scorer.at_once:
                    own = sorted(wanted[self.units[known].linears[0]])
                    together += [_with(centre, known, option) for option in own]
                    known += 1
                self.score(together)
            self.losses.append(
                [
                    max(least, self.kl(_with(centre, index, option)) - base) if option in options else math.inf
                    for option in range(len(unit.options))
                ]
            )
        self.save("losses", number, {"losses": self.losses})

    def _compress(self, space: Sequence[LinearChoices], centre: Assignment, number: int, **how: Any) -> Bank:
        """Compress all linear layers in every wanted way."""
        # Where the layers before it are dense, a layer has no errors of theirs to compensate.
        recipe = replace(self._recipe, target="local") if centre == self.costs.dense else self._recipe
        how = {"layers": self._layers, "journal": self._journal, **how}
        levels = dict(zip((linear.name for linear in self._space), self._levels(centre), strict=True))
        at = tuple(levels[linear.name] for linear in space)
        return self._build_bank(space=space, centre=at, centre_weights={}, recipe=recipe, number=number, **how)

    def _release_scorer(self) -> None:
        """Free the scorer, with its copy of the model: the device has room for one."""
        self._tokens, self._scorer = self.tokens, None

    def drop_undercut(self) -> None:
        """Compress `PROBED` linear layers in every way; drop choices that another one undercuts (`UNDERCUT`)."""
        first = [linear for linear in self._space if linear.decoder_layer == self._space[0].decoder_layer]
        weights = {linear.name: weight_of(self._model.get_submodule(linear.name)).numel() for linear in first}
        probed = sorted(weights, key=weights.__getitem__)[:PROBED]
        space = [linear for linear in self._space if linear.name in probed]
        layers = [layer.only(probed) for layer in self._layers[: space[0].decoder_layer + 1]]
        # Pieces of this bank in the journal would replace those of an interrupted run.
        bank = self._compress(space, self.costs.dense, -1, layers=layers, journal=None)
        errors: dict[Choice, list[float]] = {}
        for linear in self._space:
            for level, masked in bank[linear.name].items() if linear.name in probed else ():
                errors.setdefault(linear.choices[level], []).append(masked.report.error or 0.0)
        uniforms = self.costs.uniforms()
        known = {one: own for one, own in errors.items() if one in uniforms and len(own) == len(probed)}
        dropped = dominated(known, uniforms, self.costs.options, UNDERCUT)
        self._keep({choice for linear in self._space for choice in linear.choices} - dropped)

    def _keep(self, kept: Set[Choice]) -> None:
        """Keep these choices in the search, and no others."""
        self._space = [
            replace(linear, wanted=frozenset(i for i in linear.wanted if linear.choices[i] in kept))
            for linear in self._space
        ]

    def keep_options(self, options: Sequence[Set[int]]) -> None:
        """Keep these options of each unit, and no others."""
        per_linear = [kept for unit, kept in zip(self.units, options, strict=True) for _ in unit.linears]
        self._space = [
            replace(linear, wanted=frozenset(kept)) for linear, kept in zip(self._space, per_linear, strict=True)
        ]

    def single_losses(self) -> list[list[float]]:
        """Measure what each option of each unit alone changes in the dense model, [units][options].

        The loss of an option that was dropped is infinite.
        """
        self.measure(self.costs.dense)
        return self.losses

    def _drop_dominated(self) -> None:
        """Measure every choice in all layers at once; drop those that another one dominates (`DOMINATED`)."""
        wanted = {linear.choices[level] for linear in self._space for level in linear.wanted}
        uniforms = {choice: picks for choice, picks in self.costs.uniforms().items() if choice in wanted}
        assert self._scorer is not None
        if self._scorer.at_once > 1:
            self.score(list(uniforms.values()))
        for done, (choice, picks) in enumerate(uniforms.items()):
            self._progress("measuring each choice everywhere", done, len(uniforms))
            self.uniform_kl[choice] = max(0.0, self.kl(picks))  # rounding errors of the sums can make it negative
        losses = {choice: (kl,) for choice, kl in self.uniform_kl.items()}
        self._keep(wanted - dominated(losses, uniforms, self.costs.options, DOMINATED))

    def best(self, limits: Mapping[str, float]) -> Assignment:
        """Return the assignment with the least sum of measured losses that keeps the limits."""
        return self.costs.allocate(self.losses, limits)

    @property
    def without_zeros(self) -> list[list[bool]]:
        """Whether each option keeps all weights, [units][options]."""
        return [[parse_pattern(option.choice.pattern).density == 1 for option in unit.options] for unit in self.units]

    def best_uniform(self, limits: Mapping[str, float]) -> Choice | None:
        """Return the choice with the lowest KL in the first bank, of those that keep the limits in all layers."""
        uniforms = self.costs.uniforms()
        within = [
            choice
            for choice in self.uniform_kl
            if all(self.costs.relative(uniforms[choice])[name] <= share * (1 + 1e-9) for name, share in limits.items())
        ]
        return min(within, key=self.uniform_kl.__getitem__, default=None)

    def kl(self, assignment: Assignment) -> float:
        """Return the KL divergence of a candidate on all of the search's tokens, in nats per token."""
        if assignment not in self._kl:
            self._score_whole(assignment)
        return self._kl[assignment]

    def score(self, assignments: Sequence[Assignment]) -> None:
        """Score candidates that are not known yet, all at once: the ranks share them out."""
        assert self._scorer is not None
        new = [one for one in dict.fromkeys(assignments) if one not in self._kl]
        every = range(self._scorer.batches)
        scores = self._scorer.score_all([(self._levels(one), every) for one in new], keep_states=False)
        self._kl |= zip(new, map(self._scorer.mean_kl, scores), strict=True)
        self.evaluations += len(new)

    def quick_kl(self, assignments: Sequence[Assignment], batches: Sequence[int]) -> dict[Assignment, float]:
        """Return the KL divergence of candidates, summed over some of the scored batches."""
        assert self._scorer is not None
        scores = self._scorer.score_all([(self._levels(one), batches) for one in assignments], keep_states=False)
        return {one: sum(score.kl for score in own) for one, own in zip(assignments, scores, strict=True)}

    @property
    def scored_batches(self) -> int:
        """The number of batches that candidates are scored on."""
        return len(self._token_batches)

    def take_if_better(self, picks: Assignment, best: Assignment) -> Assignment:
        """Compress one more candidate on its own activations; return it if its KL divergence is below that of ``best``.

        Both are scored on sequences that are not the search's: it has selected ``best`` by its own.
        """
        space = [
            replace(linear, wanted=frozenset({level}))
            for linear, level in zip(self._space, self._levels(picks), strict=True)
        ]
        number, self._number = self._number, self._number + 1
        self._release_scorer()
        bank = self._compress(space, picks, number)
        tokens = padded_batches(self.others, COMPARED * self._parts)
        kl = {}
        for assignment, weights in ((best, self._bank), (picks, bank)):
            scorer = self._scorer_of(space, weights, tokens)
            kl[assignment] = scorer.mean_kl(scorer.score(self._levels(assignment), range(scorer.batches)))
            self.evaluations, self._tokens = self.evaluations + 1, self._tokens + scorer.tokens_run
            del scorer  # before the next one copies the model
        if kl[picks] >= kl[best]:
            return best
        self._bank, self._kl = bank, {}  # the result's KL is on the search's tokens
        self._scorer = self._scorer_of(space, bank, self._token_batches)
        return picks

    def _scorer_of(self, space: Sequence[LinearChoices], bank: Bank, batches: Sequence[Tensor]) -> Scorer:
        return self._scorer_type(self._model, space, bank, batches, self._device, self._ranks)

    def choices(self, assignment: Assignment) -> dict[str, Choice]:
        """Return the choice of each linear layer, by module name."""
        levels = self._levels(assignment)
        return {linear.name: linear.choices[level] for linear, level in zip(self._space, levels, strict=True)}

    def weights(self, assignment: Assignment) -> dict[str, MaskedWeight]:
        """Return the compressed weight of each linear layer, by module name."""
        levels = self._levels(assignment)
        return {linear.name: self._bank[linear.name][level] for linear, level in zip(self._space, levels, strict=True)}

    def _levels(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the index of each linear layer's choice, its level."""
        return tuple(pick for unit, pick in zip(self.units, assignment, strict=True) for _ in unit.linears)

    def _score_whole(self, assignment: Assignment) -> list[BatchScore]:
        assert self._scorer is not None
        scores = self._scorer.score(self._levels(assignment), range(self._scorer.batches))
        self._kl[assignment] = self._scorer.mean_kl(scores)
        self.evaluations += 1
        return scores

    def save(self, part: str, number: int, notes: Mapping[str, Any]) -> None:
        """Save notes with everything that has been scored, so that a resumed run scores, and counts, nothing twice."""
        if self._journal:
            scored = {"kl": list(self._kl.items()), "evaluations": self.evaluations, "tokens": self.tokens}
            self._journal.save(part, number, {}, {**notes, **scored})

    def load(self, part: str, number: int) -> Mapping[str, Any] | None:
        """Load the notes of a finished part; None if it is not finished."""
        saved = self._journal.load(part, number) if self._journal else None
        if saved is None:
            return None
        notes = saved[1]
        self._kl = {tuple(assignment): kl for assignment, kl in notes["kl"]}
        self.evaluations = notes["evaluations"]
        self._tokens = notes["tokens"] - (self._scorer.tokens_run if self._scorer else 0)
        return notes

    @property
    def tokens(self) -> int:
        """Tokens run through the model so far."""
        return self._tokens + (self._scorer.tokens_run if self._scorer else 0)


def _with(assignment: Assignment, unit: int, option: int) -> Assignment:
    return (*assignment[:unit], option, *assignment[unit + 1 :])

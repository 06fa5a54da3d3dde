"""``search=joint``: choose pattern, bits and format of every layer together, under limits on bits and times.

Linear layers that share an input form a unit and get the same choice. The caller says what a choice costs. Its KL
divergence is measured here: first of every choice in one unit with all other units unchanged, then of whole candidates.
Small KL divergences of single units add up, so the allocation that minimises their sum is a good start
(docs/experiments/joint-search.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.choice import Choice
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.propagate import list_decoder_layers
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.allocate import Unreachable, allocate
from semisparse.compress.search.bank import Bank, MaskedWeight, build_bank
from semisparse.compress.search.score import BatchScore, Scorer, scoring_batches
from semisparse.compress.search.units import LinearChoices, OptionsOf, compress_every_way, find_units
from semisparse.patterns import Pattern, parse_pattern

PASSES = 2
"""Number of banks. The first is compressed on the dense model's activations, so that its losses are those of single
units in a dense model; the second on the activations of the first one's best candidate."""

PROPOSALS = 8
"""Candidates per generation; a quarter of them are scored on all tokens."""

SPREAD = 0.4
"""Standard deviation of the logarithm of the random factors by which the measured losses are multiplied before a
proposal is allocated for them."""

SCORED_BATCHES = 4
"""Batches that the scored tokens are split into; proposals are first scored on one of them."""

DOMINATED = 1.1
"""A choice is dropped if another one costs no more in any unit and, in all layers, has a KL lower by this factor."""

Assignment = tuple[int, ...]
"""The index of an option for each unit."""


@dataclass(frozen=True)
class JointResult:
    """The result of a joint search.

    Args:
        choices: the choice of each linear layer, by module name.
        weights: the weights compressed by these choices, by module name: the very weights that were scored.
        kl: KL(dense || candidate) on the search's tokens, mean in nats per token.
        uniform: label of the best single choice for all layers that keeps the limits, and its KL in the first bank;
            None if none does.
        predicted: the total of each cost, relative to dense.
        evaluations: number of candidates scored, on all or some of the tokens.
        tokens: number of tokens run through the model for that.
    """

    choices: Mapping[str, Choice]
    weights: Mapping[str, MaskedWeight]
    kl: float
    uniform: tuple[str, float] | None
    predicted: Mapping[str, float]
    evaluations: int
    tokens: int

    @property
    def patterns(self) -> dict[str, Pattern]:
        """The pattern of each linear layer, by module name."""
        return {name: parse_pattern(choice.pattern) for name, choice in self.choices.items()}

    def metrics(self) -> dict[str, Any]:
        """Return the numbers, for the checkpoint."""
        label, kl = self.uniform or (None, None)
        return {
            "uniform": label,
            "uniform_kl": kl,
            "kl": self.kl,
            "evaluations": self.evaluations,
            "tokens": self.tokens,
            "predicted": dict(self.predicted),
        }


def search_choices(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    options: OptionsOf,
    limits: Mapping[str, float],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
    ranks: Ranks | None = None,
    offload: Path | None = None,
) -> JointResult:
    """Choose every layer's pattern, bits and format so that the KL divergence is least and all limits hold.

    Args:
        model: a transformers causal language model; it is not changed.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: how to prune; `search_tokens` and `search_effort`.
        options: what a unit may become, and what it costs.
        limits: the largest total of each cost, relative to dense.
        seed: seed of everything drawn at random.
        device: where to compute, in float32.
        progress: called before each decoder layer of a bank, each unit and each generation.
        journal: stores banks, measured losses and generations, and provides those of an interrupted run.
        ranks: the processes that search; by default this one.
        offload: a directory for hidden states, as in `compress_decoder_layers`.

    Raises:
        Unreachable: no choice of layers keeps the limits.
        InputError: the model, a weight or the batches cannot be used.
    """
    search = JointSearch(
        model,
        batches,
        recipe,
        options,
        seed=seed,
        device=device,
        progress=progress,
        journal=journal,
        ranks=ranks,
        offload=offload,
    )
    search.allocate(search.proxy_losses(), limits)  # raises before any work where the limits cannot be kept
    return search.result(search.run(limits), limits)


class JointSearch:
    """The state of a joint search: units, a bank of their compressed weights, a scorer and the measured losses.

    Args:
        model: as in `search_choices`, like the rest.
        batches: calibration token ids.
        recipe: how to prune.
        options: what a unit may become.
        seed: seed of everything drawn at random.
        device: where to compute.
        progress: called with (stage, steps done, total steps).
        journal: stores finished work.
        ranks: the processes that search.
        offload: a directory for hidden states.
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
    ) -> None:
        check_batches(model, batches)
        model.eval()
        self._model, self._recipe, self._seed = model, recipe, seed
        self._device, self._progress, self._journal = torch.device(device), progress, journal
        self._ranks = ranks or Ranks()
        layers = list_decoder_layers(model, recipe, {})
        self._build_bank = partial(
            build_bank,
            model,
            layers,
            batches=batches,
            recipe=recipe,
            device=self._device,
            progress=progress,
            journal=journal,
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
        self._costs = [[option.costs for option in unit.options] for unit in self.units]
        self.dense_costs = self.totals(self.dense)
        self._token_batches = scoring_batches(batches, recipe.search_tokens, seed, SCORED_BATCHES)
        self._bank: Bank = {}
        self._scorer: Scorer | None = None
        self._losses: list[list[float]] = []
        self.uniform_kl: dict[Choice, float] = {}
        self._kl: dict[Assignment, float] = {}
        self._number = 0
        self.evaluations = self._tokens = 0

    def totals(self, assignment: Assignment) -> dict[str, float]:
        """Return the sum of each cost over the units."""
        picked = [costs[pick] for costs, pick in zip(self._costs, assignment, strict=True)]
        return {name: sum(cost[name] for cost in picked) for name in picked[0]}

    def relative(self, assignment: Assignment) -> dict[str, float]:
        """Return the sum of each cost over the units, relative to dense."""
        return {name: total / self.dense_costs[name] for name, total in self.totals(assignment).items()}

    def allocate(self, losses: Sequence[Sequence[float]], limits: Mapping[str, float]) -> Assignment:
        """Return the assignment with the least sum of losses ([units][options]) that keeps limits relative to dense.

        Raises:
            Unreachable: there is none; its `least` is relative to dense, too.
        """
        dense = self.dense_costs
        try:
            return allocate(losses, self._costs, {name: share * dense[name] for name, share in limits.items()})
        except Unreachable as error:
            least = {name: total / dense[name] for name, total in error.least.items()}
            raise Unreachable(str(error), least) from error

    def proxy_losses(self) -> list[list[float]]:
        """Return estimated losses, [units][options]: each bit per weight divides the squared rounding error by 4."""
        return [
            [unit.weights * 4.0 ** -(option.costs["bits"] / unit.weights) for option in unit.options]
            for unit in self.units
        ]

    @property
    def dense(self) -> Assignment:
        """The assignment that leaves every layer as it is."""
        return (0,) * len(self.units)

    def measure(self, centre: Assignment) -> None:
        """Compress every layer in every way, and measure what each option of each unit alone changes.

        Args:
            centre: the options of the other units while a layer is compressed and its options are measured. Weights
                are compressed to compensate the errors of the layers before them at the centre. They fit candidates
                far from it less: with a centre of 4 bits in all layers, the best option of one unit in an otherwise
                dense model had a KL divergence of 2.3 on stories260k.
        """
        number, self._number = self._number, self._number + 1
        self._bank = self._build_bank(space=self._space, centre=self._levels(centre), centre_weights={}, number=number)
        self._tokens += self._scorer.tokens_run if self._scorer else 0
        self._scorer = Scorer(self._model, self._space, self._bank, self._token_batches, self._device, self._ranks)
        self._kl = {}
        scores = self._score_whole(centre)
        self._scorer.set_parent(self._levels(centre), scores)
        if number == 0:
            self._drop_dominated()
        saved = self._load("losses", number)
        if saved:
            self._losses = saved["losses"]
            return
        base, self._losses = self.kl(centre), []
        # Nothing is better than the dense model: rounding errors of the sums must not make 8 bits look so.
        least = 0.0 if centre == self.dense else -math.inf
        wanted = {linear.name: linear.wanted for linear in self._space}
        for index, unit in enumerate(self.units):
            self._progress("measuring what each choice loses", index, len(self.units))
            options = wanted[unit.linears[0]]
            self._score_several([_with(centre, index, option) for option in sorted(options)])
            self._losses.append(
                [
                    max(least, self.kl(_with(centre, index, option)) - base) if option in options else math.inf
                    for option in range(len(unit.options))
                ]
            )
        self._save("losses", number, {"losses": self._losses})

    def single_losses(self) -> list[list[float]]:
        """Measure what each option of each unit alone changes in the dense model, [units][options].

        The loss of an option that was dropped is infinite.
        """
        self.measure(self.dense)
        return self._losses

    def _drop_dominated(self) -> None:
        """Measure every choice in all layers at once; drop those that another one dominates (`DOMINATED`).

        The other choice costs no more in any unit, so limits that could be kept can still be kept.
        """
        uniforms = self.uniforms()
        for done, (choice, picks) in enumerate(uniforms.items()):
            self._progress("measuring each choice everywhere", done, len(uniforms))
            self.uniform_kl[choice] = max(0.0, self.kl(picks))  # rounding errors of the sums can make it negative
        dropped = {
            choice
            for choice, picks in uniforms.items()
            if any(
                DOMINATED * self.uniform_kl[other] < self.uniform_kl[choice] and self._costs_no_more(others, picks)
                for other, others in uniforms.items()
            )
        }
        self._space = [
            replace(linear, wanted=frozenset(i for i, choice in enumerate(linear.choices) if choice not in dropped))
            for linear in self._space
        ]

    def _costs_no_more(self, cheap: Assignment, dear: Assignment) -> bool:
        """Return whether no cost of any unit is higher in assignment ``cheap`` than in ``dear``."""
        return all(
            costs[one][name] <= cost
            for costs, one, other in zip(self._costs, cheap, dear, strict=True)
            for name, cost in costs[other].items()
        )

    def best(self, limits: Mapping[str, float]) -> Assignment:
        """Return the assignment with the least sum of measured losses that keeps the limits."""
        return self.allocate(self._losses, limits)

    def run(self, limits: Mapping[str, float]) -> Assignment:
        """Search in `PASSES` passes; return the best assignment of the last one."""
        best = centre = self.dense
        for number in range(PASSES):
            self.measure(centre)
            start = min({self.best(limits), best} if number else {self.best(limits)}, key=self.kl)
            best = centre = self._refine(start, limits, number)
        return best

    def kl(self, assignment: Assignment) -> float:
        """Return the KL divergence of a candidate on all of the search's tokens, in nats per token."""
        if assignment not in self._kl:
            self._score_whole(assignment)
        return self._kl[assignment]

    def uniform(self, choice: Choice) -> Assignment | None:
        """Return the assignment of one choice to all units; None if a unit does not have it."""
        picks = []
        for unit in self.units:
            matching = [index for index, option in enumerate(unit.options) if option.choice == choice]
            if not matching:
                return None
            picks.append(matching[0])
        return tuple(picks)

    def uniforms(self) -> dict[Choice, Assignment]:
        """Return the assignments of one choice to all units."""
        choices = dict.fromkeys(option.choice for unit in self.units for option in unit.options)
        return {choice: picks for choice in choices if (picks := self.uniform(choice)) is not None}

    def result(self, best: Assignment, limits: Mapping[str, float]) -> JointResult:
        """Return the result; it includes the best uniform choice for comparison."""
        within = {
            choice.label: self.uniform_kl[choice]
            for choice, picks in self.uniforms().items()
            if all(self.relative(picks)[name] <= share * (1 + 1e-9) for name, share in limits.items())
        }
        uniform = min(within.items(), key=lambda item: item[1], default=None)
        levels = self._levels(best)
        return JointResult(
            {linear.name: linear.choices[level] for linear, level in zip(self._space, levels, strict=True)},
            {linear.name: self._bank[linear.name][level] for linear, level in zip(self._space, levels, strict=True)},
            self.kl(best),
            uniform,
            self.relative(best),
            self.evaluations,
            self.tokens,
        )

    def _levels(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the index of each linear layer's choice, its level."""
        return tuple(pick for unit, pick in zip(self.units, assignment, strict=True) for _ in unit.linears)

    def _score_several(self, assignments: Sequence[Assignment]) -> None:
        """Score candidates that are not known yet, all at once: the ranks share them out."""
        assert self._scorer is not None
        batches, new = range(self._scorer.batches), [one for one in dict.fromkeys(assignments) if one not in self._kl]
        scores = self._scorer.score_all([(self._levels(one), batches) for one in new], keep_states=False)
        self._kl |= zip(new, map(self._scorer.mean_kl, scores), strict=True)
        self.evaluations += len(new)

    def _score_whole(self, assignment: Assignment) -> list[BatchScore]:
        assert self._scorer is not None
        scores = self._scorer.score(self._levels(assignment), range(self._scorer.batches))
        self._kl[assignment] = self._scorer.mean_kl(scores)
        self.evaluations += 1
        return scores

    def _refine(self, best: Assignment, limits: Mapping[str, float], number: int) -> Assignment:
        """Score allocations for randomly disturbed losses; return the best assignment."""
        scorer = self._scorer
        assert scorer is not None
        generations = max(1, self._recipe.search_effort // (PASSES * PROPOSALS))
        first = 0
        saved = self._load("joint", number)
        if saved:
            first, best = saved["generation"], tuple(saved["best"])
        for generation in range(first, generations):
            self._progress(f"search: best KL so far {self.kl(best):.4f}", generation, generations)
            rng = random.Random(f"{self._seed} {number} {generation}")
            proposals = {self.allocate(self._disturbed(rng), limits) for _ in range(PROPOSALS)} - {best}
            few = rng.sample(range(scorer.batches), max(1, scorer.batches // 4))

            scores = scorer.score_all([(self._levels(picks), few) for picks in sorted(proposals)], keep_states=False)
            quick_kl = {
                picks: sum(score.kl for score in of_picks)
                for picks, of_picks in zip(sorted(proposals), scores, strict=True)
            }
            ranked = sorted(sorted(proposals), key=quick_kl.__getitem__)[: PROPOSALS // 4]
            self._score_several(ranked)
            for picks in ranked:
                if self.kl(picks) < self.kl(best):
                    best = picks
            self._save("joint", number, {"generation": generation + 1, "best": best})
        return best

    def _save(self, part: str, number: int, notes: Mapping[str, Any]) -> None:
        """Save notes with everything that has been scored, so that a resumed run scores, and counts, nothing twice."""
        if self._journal:
            scored = {"kl": list(self._kl.items()), "evaluations": self.evaluations, "tokens": self.tokens}
            self._journal.save(part, number, {}, {**notes, **scored})

    def _load(self, part: str, number: int) -> Mapping[str, Any] | None:
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

    def _disturbed(self, rng: random.Random) -> list[list[float]]:
        """Return the measured losses, each multiplied by a random factor (`SPREAD`)."""
        return [[loss * rng.lognormvariate(0, SPREAD) for loss in losses] for losses in self._losses]  # inf stays inf


def _with(assignment: Assignment, unit: int, option: int) -> Assignment:
    return (*assignment[:unit], option, *assignment[unit + 1 :])

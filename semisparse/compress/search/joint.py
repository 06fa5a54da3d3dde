"""``search=joint``: choose pattern, bits and format of every layer together, under limits on bits and times.

Linear layers that share an input form a unit and get the same choice. The caller says what a choice costs. Its KL
divergence is measured: first of every choice in one unit with all other units unchanged (losses.py), then of whole
candidates. Small KL divergences of single units add up, so the allocation that minimises their sum is a good start
(docs/experiments/joint-search.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.choice import Choice
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.allocate import Unreachable
from semisparse.compress.search.costs import Assignment
from semisparse.compress.search.losses import ChoiceLosses
from semisparse.compress.search.masked import MaskedWeight
from semisparse.compress.search.units import OptionsOf
from semisparse.errors import InputError
from semisparse.patterns import Pattern, parse_pattern

PASSES = 2
"""Number of banks. The first is compressed on the dense model's activations, so its losses are those of single units in
a dense model. The second is compressed on the activations of the first one's best candidate."""

PROPOSALS = 8
"""Candidates per generation; a quarter of them are scored on all tokens."""

SPREAD = 0.4
"""Standard deviation of the logarithm of the random factors by which the measured losses are multiplied before a
proposal is allocated for them."""

HOPELESS = 2.0
"""Other assignments are not compared with the search's result if their KL is above this multiple of the result's: that
of a single choice for all layers in the first bank, that of an assignment without zeros in the last one."""

COMPARED_LATER = "bqpo"
"""The tuning after which assignments are compared, instead of before: which has the lowest KL may change in tuning."""


@dataclass(frozen=True)
class Finalist:
    """An assignment that may have a lower KL than the search's result once both are tuned.

    Args:
        label: ``without zeros``, or the label of a single choice for all layers.
        choices: the choice of each linear layer, by module name.
        predicted: the total of each cost, relative to dense.
    """

    label: str
    choices: Mapping[str, Choice]
    predicted: Mapping[str, float]


@dataclass(frozen=True)
class JointResult:
    """The result of a joint search.

    Args:
        choices: the choice of each linear layer, by module name.
        weights: the weights compressed by these choices, by module name: the very weights that were scored.
        kl: KL(dense || candidate) on the search's tokens, mean in nats per token.
        uniform: label of the best single choice for all layers that keeps the limits, and its KL in the first bank;
            None if none does.
        finalists: what is still to be compared with `choices`, by tuning all.
        predicted: the total of each cost, relative to dense.
        evaluations: number of candidates scored, on all or some of the tokens.
        tokens: number of tokens run through the model for that.
    """

    choices: Mapping[str, Choice]
    weights: Mapping[str, MaskedWeight]
    kl: float
    uniform: tuple[str, float] | None
    finalists: tuple[Finalist, ...]
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
    streams: bool = False,
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
        streams: as in `search_patterns`.

    Raises:
        Unreachable: no choice of layers keeps the limits.
        InputError: the model, a weight or the batches cannot be used, or there is only one sequence.
    """
    losses = ChoiceLosses(
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
        streams=streams,
    )
    if not losses.others:
        raise InputError(
            "a search for choices needs at least 2 calibration sequences, some to search on and others to compare its "
            "results on; got 1: give more text or more samples"
        )
    losses.costs.allocate(losses.costs.proxy_losses(), limits)  # raises before any work where the limits cannot be kept
    compares_later = recipe.tune == COMPARED_LATER
    search = JointSearch(losses, limits, recipe.search_effort, seed, progress, compares_later)
    best = search.run()
    finalists = search.finalists(best) if compares_later else {}
    single = None if compares_later else search.single_choice(best)
    if single is not None:
        best = losses.take_if_better(single, best)
    uniform = losses.best_uniform(limits)
    return JointResult(
        losses.choices(best),
        losses.weights(best),
        losses.kl(best),
        None if uniform is None else (uniform.label, losses.uniform_kl[uniform]),
        tuple(Finalist(name, losses.choices(one), losses.costs.relative(one)) for name, one in finalists.items()),
        losses.costs.relative(best),
        losses.evaluations,
        losses.tokens,
    )


class JointSearch:
    """The search for the best assignment of options to units.

    Args:
        losses: of the units; nothing is measured yet.
        limits: the largest total of each cost, relative to dense.
        effort: `search_effort` of the recipe.
        seed: seed of everything drawn at random.
        progress: called with (stage, generations done, all generations).
        compares_later: whether `finalists` will be asked for.
    """

    def __init__(
        self,
        losses: ChoiceLosses,
        limits: Mapping[str, float],
        effort: int,
        seed: int,
        progress: Progress,
        compares_later: bool,
    ) -> None:
        self._losses, self._limits, self._seed, self._progress = losses, limits, seed, progress
        self._generations = max(1, effort // (PASSES * PROPOSALS))
        self._compares_later = compares_later
        self._without_zeros: Assignment | None = None

    def run(self) -> Assignment:
        """Search in `PASSES` passes; return the best assignment of the last one."""
        losses = self._losses
        losses.drop_undercut()
        best = losses.costs.dense
        for number in range(PASSES):
            losses.measure(best)
            allocated = losses.best(self._limits)
            start = min({allocated, best} if number else {allocated}, key=losses.kl)
            best, proposed = self._refine(start, number)
            self._without_zeros = self._best_without_zeros(number) if self._compares_later else None
            for options, pick in zip(proposed, self._without_zeros or (), strict=False):
                options.add(pick)
            losses.keep_options(proposed)  # the others are far from any optimum, and cost as much
        return best

    def _refine(self, best: Assignment, number: int) -> tuple[Assignment, list[set[int]]]:
        """Score allocations for randomly disturbed losses; return the best, and the options that they had."""
        losses, first, proposed = self._losses, 0, [{option} for option in best]
        saved = losses.load("joint", number)
        if saved:
            first, best = saved["generation"], tuple(saved["best"])
            proposed = [set(options) for options in saved["proposed"]]
        for generation in range(first, self._generations):
            self._progress(f"search: best KL so far {losses.kl(best):.4f}", generation, self._generations)
            rng = random.Random(f"{self._seed} {number} {generation}")
            drawn = {losses.costs.allocate(self._disturbed(rng), self._limits) for _ in range(PROPOSALS)} - {best}
            few = rng.sample(range(losses.scored_batches), max(1, losses.scored_batches // 4))
            if len(few) == losses.scored_batches:
                losses.score(sorted(drawn))
                quick = {one: losses.kl(one) for one in drawn}
            else:
                quick = losses.quick_kl(sorted(drawn), few)
            ranked = sorted(quick, key=quick.__getitem__)[: PROPOSALS // 4]
            losses.score(ranked)
            best = min([best, *ranked], key=losses.kl)
            for options, picks in zip(proposed, zip(*drawn, strict=True), strict=False):  # none may be drawn
                options |= set(picks)
            listed = [sorted(options) for options in proposed]
            losses.save("joint", number, {"generation": generation + 1, "best": best, "proposed": listed})
        return best, proposed

    def _disturbed(self, rng: random.Random) -> list[list[float]]:
        """Return the measured losses, each multiplied by a random factor (`SPREAD`)."""
        return [[loss * rng.lognormvariate(0, SPREAD) for loss in row] for row in self._losses.losses]  # inf stays inf

    def _best_without_zeros(self, number: int) -> Assignment | None:
        """Return the best of some allocations of options without zeros; None if they cannot keep the limits.

        Tuning trains no mask, so that it gains less where weights are zero: by the KL before tuning the search takes
        zeros too often.
        """
        losses, rng = self._losses, random.Random(f"{self._seed} without zeros {number}")

        def allowed(table: Sequence[Sequence[float]]) -> list[list[float]]:
            rows = zip(table, losses.without_zeros, strict=True)
            return [[loss if whole else math.inf for loss, whole in zip(*row, strict=True)] for row in rows]

        if any(min(row) == math.inf for row in allowed(losses.losses)):
            return None  # what is left of a unit's options has zeros
        try:
            tables = [losses.losses, *(self._disturbed(rng) for _ in range(PROPOSALS))]
            drawn = {losses.costs.allocate(allowed(table), self._limits) for table in tables}
        except Unreachable:
            return None
        losses.score(sorted(drawn))
        return min(sorted(drawn), key=losses.kl)

    def finalists(self, best: Assignment) -> dict[str, Assignment]:
        """Return by label what may be better than ``best`` after tuning, beside ``best`` itself.

        If ``best`` has no zeros either, another assignment without zeros is not expected to gain more from tuning.
        """
        losses, finalists = self._losses, dict[str, Assignment]()
        without_zeros, single = self._without_zeros, self.single_choice(best)
        has_zeros = not all(whole[pick] for whole, pick in zip(losses.without_zeros, best, strict=True))
        factor = HOPELESS if has_zeros else 1.0
        if without_zeros not in (None, best) and losses.kl(without_zeros) <= factor * losses.kl(best):
            finalists["without zeros"] = without_zeros
        if single is not None and single != without_zeros:
            choice = losses.best_uniform(self._limits)
            assert choice is not None
            finalists[choice.label] = single
        return finalists

    def single_choice(self, best: Assignment) -> Assignment | None:
        """Return the best single choice for all layers that keeps the limits.

        None if there is none, if it is ``best``, or if its KL divergence is too high for it to be better.
        """
        losses = self._losses
        choice = losses.best_uniform(self._limits)
        if choice is None or losses.uniform_kl[choice] > HOPELESS * losses.kl(best):
            return None
        picks = losses.costs.uniforms()[choice]
        return None if picks == best else picks

"""``search=evolution``: elitist (1 + lambda) level switching, coarse to fine, with more tokens for the survivors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import BatchScore, Scorer
from semisparse.compress.search.space import STAGE_STRIDES, Candidate, LinearSpace, switch_levels
from semisparse.compress.search.state import State

OFFSPRING = 16
"""Offspring per generation; a quarter of them survive the first round of scoring, one the second."""

MAX_SWITCHES = 3
"""Maximum level switches per mutation. As in EvoPress, the number is the lower of two random ones: mostly 1."""

REACH = 3
"""Minimum number of strides by which all passes of a stage together can move a linear layer."""


class Evolution:
    """Each generation mutates the best candidate, and replaces it by the best offspring if that is better.

    Offspring are first scored on few tokens; the final comparison is on all. Each of the three stages, coarse to fine,
    has `search_banks` passes. Each pass prunes a new bank around the best candidate. A bank's weights are pruned for
    the inputs that they get in that candidate; the more a candidate differs from it, the less they fit.

    Args:
        space: as in `Algorithm`.
        scorer: as in `Algorithm`.
        recipe: its `search_effort` and `search_banks`.
        seed: as in `Algorithm`.
        number: as in `Algorithm`.
    """

    def __init__(self, space: Sequence[LinearSpace], scorer: Scorer, recipe: Recipe, seed: int, number: int) -> None:
        self._space, self._scorer, self._seed = space, scorer, seed
        self._stage, passes = number // recipe.search_banks, self.passes(recipe)
        few, more = max(1, scorer.batches // 16), max(1, scorer.batches // 4)
        self._rounds = ((OFFSPRING, few), (OFFSPRING // 4, more), (1, scorer.batches))
        cost = OFFSPRING * few + OFFSPRING // 4 * (more - few) + scorer.batches - more
        self.generations = max(passes, recipe.search_effort * scorer.batches // cost)
        self.end = -(-(number + 1) * self.generations // passes)

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Return the number of passes: the same number for each stage."""
        return len(STAGE_STRIDES) * recipe.search_banks

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Return how far all passes together can move a linear layer from level 0, as in `search_space`."""
        return recipe.search_banks * _steps(recipe)

    @staticmethod
    def pass_space(space: Sequence[LinearSpace], best: Candidate, number: int, recipe: Recipe) -> list[LinearSpace]:
        """Return the levels near those of the best candidate."""
        stage = number // recipe.search_banks
        return [linear.restricted_to(level, stage, _steps(recipe)) for linear, level in zip(space, best, strict=True)]

    def next_generation(self, state: State) -> State:
        """Run one generation."""
        rng = random.Random(f"{self._seed} {state.generation}")
        offspring = {self._mutated(state.best, rng) for _ in range(OFFSPRING)} - {state.best}
        order = rng.sample(range(self._scorer.batches), self._scorer.batches)
        scores: dict[Candidate, dict[int, BatchScore]] = {candidate: {} for candidate in sorted(offspring)}
        for survivors, batches in self._rounds:
            scores = dict(sorted(scores.items(), key=_total_kl)[:survivors])
            missing = {
                candidate: [index for index in order[:batches] if index not in known]
                for candidate, known in scores.items()
            }
            new_scores = self._scorer.score_all(list(missing.items()))
            for (candidate, indices), new in zip(missing.items(), new_scores, strict=True):
                scores[candidate] |= zip(indices, new, strict=True)
        best, kl = state.best, state.kl
        for candidate, known in scores.items():
            in_order = [known[index] for index in range(self._scorer.batches)]
            if self._scorer.mean_kl(in_order) < state.kl:
                best, kl = candidate, self._scorer.mean_kl(in_order)
                self._scorer.set_parent(candidate, in_order)
        return replace(state, best=best, kl=kl, evaluations=state.evaluations + len(offspring))

    def _mutated(self, candidate: Candidate, rng: random.Random) -> Candidate:
        for _ in range(min(rng.randint(1, MAX_SWITCHES), rng.randint(1, MAX_SWITCHES))):
            candidate = switch_levels(self._space, candidate, self._stage, rng) or candidate
        return candidate


def _steps(recipe: Recipe) -> int:
    """Return by how many strides of its stage a pass may move a linear layer."""
    return -(-REACH // recipe.search_banks)


def _total_kl(item: tuple[Candidate, dict[int, BatchScore]]) -> float:
    """Return a candidate's KL divergence, summed over the batches scored, which are the same for all candidates."""
    return sum(score.kl for score in item[1].values())

"""``search=evolution``: elitist (1 + lambda) level switching, coarse to fine, with more tokens for the survivors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import Run, Scorer
from semisparse.compress.search.space import SHARES, Choice, Levels, exchange
from semisparse.compress.search.state import State

OFFSPRING = 16
"""Of each generation; a quarter of them survive the first round, one the second."""

MOST_EXCHANGES = 3
"""Between parent and offspring. The number is the lower of two throws of 1 to 3, as in EvoPress: mostly 1."""

REACH = 3
"""Steps of each stage that the passes of the stage together may move a layer, at least."""


class Evolution:
    """Each generation the best of some changed copies takes its parent's place, if it is better on all tokens.

    Each of three stages, coarse to fine, has some passes, and each pass a bank around the best candidate so far. A
    weight is pruned for the outputs of the layers before it: the further a candidate is from the bank's centre, the
    less these are what it gets.

    Args:
        choices: of the layers, as `offered` gives them for a pass.
        scorer: of candidates on them.
        recipe: its effort, in candidates that may be scored on all tokens, and its banks a stage.
        seed: of what is drawn at random.
        number: of the pass.
    """

    def __init__(self, choices: Sequence[Choice], scorer: Scorer, recipe: Recipe, seed: int, number: int) -> None:
        self._choices, self._scorer, self._seed = choices, scorer, seed
        self._stage, passes = number // recipe.search_banks, self.passes(recipe)
        few, more = max(1, scorer.parts // 16), max(1, scorer.parts // 4)
        self._rounds = ((OFFSPRING, few), (OFFSPRING // 4, more), (1, scorer.parts))
        cost = OFFSPRING * few + OFFSPRING // 4 * (more - few) + scorer.parts - more
        self.generations = max(passes, recipe.search_effort * scorer.parts // cost)
        self.end = -(-(number + 1) * self.generations // passes)

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Count the passes: some for each stage."""
        return len(SHARES) * recipe.search_banks

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Say how many steps of every stage the passes can go from the uniform level."""
        return recipe.search_banks * _steps(recipe)

    @staticmethod
    def offered(choices: Sequence[Choice], best: Levels, number: int, recipe: Recipe) -> list[Choice]:
        """Give what a pass chooses from: the levels near the best candidate's."""
        stage = number // recipe.search_banks
        return [choice.near(level, stage, _steps(recipe)) for choice, level in zip(choices, best, strict=True)]

    def live(self, state: State) -> State:
        """Live through one generation."""
        rng = random.Random(f"{self._seed} {state.generation}")
        offspring = {self._mutated(state.best, rng) for _ in range(OFFSPRING)} - {state.best}
        order = rng.sample(range(self._scorer.parts), self._scorer.parts)
        runs: dict[Levels, dict[int, Run]] = {levels: {} for levels in sorted(offspring)}
        for survivors, parts in self._rounds:
            runs = dict(sorted(runs.items(), key=_kl)[:survivors])
            for levels, known in runs.items():
                missing = [number for number in order[:parts] if number not in known]
                known |= zip(missing, self._scorer.run(levels, missing), strict=True)
        best, kl = state.best, state.kl
        for levels, known in runs.items():
            in_order = [known[number] for number in range(self._scorer.parts)]
            if self._scorer.mean_kl(in_order) < state.kl:
                best, kl = levels, self._scorer.mean_kl(in_order)
                self._scorer.adopt(levels, in_order)
        return replace(state, best=best, kl=kl, evaluations=state.evaluations + len(offspring))

    def _mutated(self, levels: Levels, rng: random.Random) -> Levels:
        for _ in range(min(rng.randint(1, MOST_EXCHANGES), rng.randint(1, MOST_EXCHANGES))):
            levels = exchange(self._choices, levels, self._stage, rng) or levels
        return levels


def _steps(recipe: Recipe) -> int:
    """Count the steps of its stage that a pass may move a layer."""
    return -(-REACH // recipe.search_banks)


def _kl(item: tuple[Levels, dict[int, Run]]) -> float:
    """Give a candidate's KL on the parts it was run on, which are the same for all."""
    return sum(run.kl for run in item[1].values())

"""``search=evolution``: elitist (1 + lambda) level switching, coarse to fine, with more tokens for the survivors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from semisparse.compress.search.score import Run, Scorer
from semisparse.compress.search.space import SHARES, Choice, Levels, exchange
from semisparse.compress.search.state import State

OFFSPRING = 16
"""Of each generation; a quarter of them survive the first round, one the second."""

MOST_EXCHANGES = 3
"""Between parent and offspring. The number is the lower of two throws of 1 to 3, as in EvoPress: mostly 1."""


class Evolution:
    """Each generation the best of some changed copies takes its parent's place, if it is better on all tokens.

    Args:
        choices: of the layers.
        scorer: of candidates on them.
        effort: candidates that may be scored on all tokens.
        seed: of what is drawn at random.
    """

    reach = 2
    """Levels reach so many steps of every stage from the uniform one, 14 of 64. With 1, seven of babyllama-1m's 35
    layers ended at the edge, and the search took 31.6 % off the held-out KL at 50 % instead of 35.9 %."""

    def __init__(self, choices: Sequence[Choice], scorer: Scorer, effort: int, seed: int) -> None:
        self._choices, self._scorer, self._seed = choices, scorer, seed
        few, more = max(1, scorer.parts // 16), max(1, scorer.parts // 4)
        self._rounds = ((OFFSPRING, few), (OFFSPRING // 4, more), (1, scorer.parts))
        cost = OFFSPRING * few + OFFSPRING // 4 * (more - few) + scorer.parts - more
        self.generations = max(len(SHARES), effort * scorer.parts // cost)

    def live(self, state: State) -> State:
        """Live through one generation."""
        rng = random.Random(f"{self._seed} {state.generation}")
        stage = state.generation * len(SHARES) // self.generations
        offspring = {self._mutated(state.best, stage, rng) for _ in range(OFFSPRING)} - {state.best}
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

    def _mutated(self, levels: Levels, stage: int, rng: random.Random) -> Levels:
        for _ in range(min(rng.randint(1, MOST_EXCHANGES), rng.randint(1, MOST_EXCHANGES))):
            levels = exchange(self._choices, levels, stage, rng) or levels
        return levels


def _kl(item: tuple[Levels, dict[int, Run]]) -> float:
    """Give a candidate's KL on the parts it was run on, which are the same for all."""
    return sum(run.kl for run in item[1].values())

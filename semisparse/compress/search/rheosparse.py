"""``search=rheosparse``: the paper's coarse-to-fine search, its gaps filled (RheoSparse, section III B)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import Scorer
from semisparse.compress.search.space import SHARES, Choice, Levels
from semisparse.compress.search.state import State

GENERATIONS = 2
"""Of each stage (section IV A)."""

PARENTS = 2
"""Individuals of a generation that the next one descends from."""


class RheoSparse:
    """Three stages around the best candidate so far, each with the levels -1, 0 and +1 of its own step.

    A gene is a layer, a segment the layers that do the same job in different blocks. The first generation of a stage is
    mutated from all zeros, the second crossed from the two best of the first and mutated. What the paper leaves open:
    a child takes each segment whole from one parent, so that the budget holds; a mutation changes one pair of genes in
    each segment; and a stage that finds nothing better leaves the candidate as it was.

    Args:
        choices: of the layers.
        scorer: of candidates on them.
        recipe: its effort, in candidates that may be scored on all tokens.
        seed: of what is drawn at random.
        number: of the one pass.
    """

    generations = end = GENERATIONS * len(SHARES)

    def __init__(self, choices: Sequence[Choice], scorer: Scorer, recipe: Recipe, seed: int, number: int) -> None:
        self._choices, self._scorer, self._seed = choices, scorer, seed
        self._individuals = max(PARENTS, recipe.search_effort // self.generations)
        segments: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, choice in enumerate(choices):
            segments.setdefault((choice.segment, tuple(choice.kept.values())), []).append(index)
        self._segments = list(segments.values())

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Count the passes: all is chosen from one bank."""
        return 1

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Give the reach of the paper's bank: 7 levels to each side of n:64, one step of 4, one of 2 and one of 1."""
        return 1

    @staticmethod
    def offered(choices: Sequence[Choice], best: Levels, number: int, recipe: Recipe) -> list[Choice]:
        """Give what the pass chooses from: all."""
        return list(choices)

    def live(self, state: State) -> State:
        """Live through one generation."""
        rng = random.Random(f"{self._seed} {state.generation}")
        stage, generation = divmod(state.generation, GENERATIONS)
        centre, *parents = (state.best,) if generation == 0 else state.pool
        children = []
        for _ in range(self._individuals):
            child = self._crossed(parents, rng) if parents else centre
            children.append(self._mutated(child, centre, stage, rng))
        scored = sorted((self._kl(levels), levels) for levels in children)
        kl, best = min(scored[0], (state.kl, state.best))
        pool = (centre, *(levels for _, levels in scored[:PARENTS]))
        return replace(state, best=best, kl=kl, pool=pool, evaluations=state.evaluations + len(children))

    def _kl(self, levels: Levels) -> float:
        return self._scorer.mean_kl(self._scorer.run(levels, range(self._scorer.parts)))

    def _crossed(self, parents: Sequence[Levels], rng: random.Random) -> Levels:
        child = list(parents[0])
        for segment in self._segments:
            parent = rng.choice(parents)
            for index in segment:
                child[index] = parent[index]
        return tuple(child)

    def _mutated(self, levels: Levels, centre: Levels, stage: int, rng: random.Random) -> Levels:
        """Flip one pair of genes in each segment: from 0, 0 to -1, +1 or back."""
        child = list(levels)
        for segment in self._segments:
            flips = [flip for pair in combinations(segment, 2) if (flip := self._flip(pair, child, centre, stage, rng))]
            if flips:
                for index, level in rng.choice(flips).items():
                    child[index] = level
        return tuple(child)

    def _flip(
        self, pair: tuple[int, int], child: Sequence[int], centre: Levels, stage: int, rng: random.Random
    ) -> dict[int, int] | None:
        """Give the levels of a flipped pair; None if it cannot be flipped, or if that would change the budget."""
        up, down = rng.sample(pair, 2)
        steps = {index: self._choices[index].strides[stage] for index in pair}
        genes = {index: (child[index] - centre[index]) // steps[index] for index in pair}
        if genes[up] == genes[down] == 0:
            flipped = {up: centre[up] + steps[up], down: centre[down] - steps[down]}
        elif genes[up] == -genes[down]:
            flipped = {index: centre[index] for index in pair}
        else:
            return None
        kept = [self._choices[index].kept for index in pair]
        if any(level not in self._choices[index].kept for index, level in flipped.items()):
            return None
        before = sum(of[child[index]] for of, index in zip(kept, pair, strict=True))
        after = sum(of[flipped[index]] for of, index in zip(kept, pair, strict=True))
        return flipped if before == after else None

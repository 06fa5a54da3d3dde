"""``search=rheosparse``: the paper's coarse-to-fine evolutionary search (RheoSparse, section III B)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from semisparse.compress.recipe import Recipe
from semisparse.compress.search.score import Scorer
from semisparse.compress.search.space import STAGE_STRIDES, Candidate, LinearSpace
from semisparse.compress.search.state import State

GENERATIONS = 2
"""Generations per stage (section IV A)."""

PARENTS = 2
"""Number of best individuals of a generation, from which the next one descends."""


class RheoSparse:
    """Three stages; each searches around the best candidate so far (its centre), with its own stride.

    A gene is -1, 0 or +1: the level of a linear layer, in strides from the centre's. A segment holds the genes of the
    linear layers of one type in all decoder layers. The first generation of a stage is mutated from all zeros. The
    second is crossed over from the two best individuals of the first, then mutated. The paper leaves three things open.
    Here a child takes each segment whole from one parent, which keeps the budget. A mutation changes one pair of genes
    in each segment. A stage that finds nothing better keeps its centre.

    Args:
        space: as in `Algorithm`.
        scorer: as in `Algorithm`.
        recipe: its `search_effort`.
        seed: as in `Algorithm`.
        number: as in `Algorithm`; there is only pass 0.
    """

    generations = end = GENERATIONS * len(STAGE_STRIDES)

    def __init__(self, space: Sequence[LinearSpace], scorer: Scorer, recipe: Recipe, seed: int, number: int) -> None:
        self._space, self._scorer, self._seed = space, scorer, seed
        self._individuals = max(PARENTS, recipe.search_effort // self.generations)
        segments: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for index, linear in enumerate(space):
            segments.setdefault((linear.name_in_layer, tuple(linear.kept.values())), []).append(index)
        self._segments = list(segments.values())

    @staticmethod
    def passes(recipe: Recipe) -> int:
        """Return 1: one bank serves all stages."""
        return 1

    @staticmethod
    def reach(recipe: Recipe) -> int:
        """Return 1, the reach of the paper's bank: one stride of each stage, 4 + 2 + 1 = 7 levels to each side."""
        return 1

    @staticmethod
    def pass_space(space: Sequence[LinearSpace], best: Candidate, number: int, recipe: Recipe) -> list[LinearSpace]:
        """Return the whole search space."""
        return list(space)

    def next_generation(self, state: State) -> State:
        """Run one generation."""
        rng = random.Random(f"{self._seed} {state.generation}")
        stage, generation = divmod(state.generation, GENERATIONS)
        centre, *parents = (state.best,) if generation == 0 else state.pool
        children = []
        for _ in range(self._individuals):
            child = self._crossed(parents, rng) if parents else centre
            children.append(self._mutated(child, centre, stage, rng))
        batches = range(self._scorer.batches)
        scores = self._scorer.score_all([(child, batches) for child in children], keep_states=False)
        scored = sorted(zip(map(self._scorer.mean_kl, scores), children, strict=True))
        kl, best = min(scored[0], (state.kl, state.best))
        pool = (centre, *(child for _, child in scored[:PARENTS]))
        return replace(state, best=best, kl=kl, pool=pool, evaluations=state.evaluations + len(children))

    def _crossed(self, parents: Sequence[Candidate], rng: random.Random) -> Candidate:
        """Take each segment from a random parent."""
        child = list(parents[0])
        for segment in self._segments:
            parent = rng.choice(parents)
            for index in segment:
                child[index] = parent[index]
        return tuple(child)

    def _mutated(self, candidate: Candidate, centre: Candidate, stage: int, rng: random.Random) -> Candidate:
        """Flip one pair of genes in each segment: from 0, 0 to -1, +1 or back."""
        child = list(candidate)
        for segment in self._segments:
            flips = [flip for pair in combinations(segment, 2) if (flip := self._flip(pair, child, centre, stage, rng))]
            if flips:
                for index, level in rng.choice(flips).items():
                    child[index] = level
        return tuple(child)

    def _flip(
        self, pair: tuple[int, int], child: Sequence[int], centre: Candidate, stage: int, rng: random.Random
    ) -> dict[int, int] | None:
        """Return the levels of a flipped pair; None if it cannot be flipped, or if that would change the budget."""
        up, down = rng.sample(pair, 2)
        strides = {index: self._space[index].strides[stage] for index in pair}
        genes = {index: (child[index] - centre[index]) // strides[index] for index in pair}
        if genes[up] == genes[down] == 0:
            flipped = {up: centre[up] + strides[up], down: centre[down] - strides[down]}
        elif genes[up] == -genes[down]:
            flipped = {index: centre[index] for index in pair}
        else:
            return None
        kept = [self._space[index].kept for index in pair]
        if any(level not in self._space[index].kept for index, level in flipped.items()):
            return None
        before = sum(by_level[child[index]] for by_level, index in zip(kept, pair, strict=True))
        after = sum(by_level[flipped[index]] for by_level, index in zip(kept, pair, strict=True))
        return flipped if before == after else None

"""Search how to spread density over the layers: more weights where they matter, as many in all."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.journal import Journal
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.bank import build_bank
from semisparse.compress.search.evolution import Evolution
from semisparse.compress.search.rheosparse import RheoSparse
from semisparse.compress.search.score import Scorer, cut_parts
from semisparse.compress.search.space import SHARES, exchange, list_choices
from semisparse.compress.search.state import Algorithm, State
from semisparse.compress.walk import list_blocks
from semisparse.errors import InputError
from semisparse.patterns import Pattern

ALGORITHMS: dict[str, type[Evolution] | type[RheoSparse]] = {"evolution": Evolution, "rheosparse": RheoSparse}
"""By the recipe's key."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        patterns: of each layer, by module name.
        uniform_kl: KL(dense || candidate) of the uniform patterns on the search's tokens, mean in nats a token.
        kl: the same of `patterns`.
        evaluations: candidates scored, on some of the tokens or all.
        tokens: tokens that these were run on.
    """

    patterns: Mapping[str, Pattern]
    uniform_kl: float
    kl: float
    evaluations: int
    tokens: int

    def measured(self) -> dict[str, float]:
        """Give all but the patterns, for the checkpoint."""
        return {"uniform_kl": self.uniform_kl, "kl": self.kl, "evaluations": self.evaluations, "tokens": self.tokens}


def search_patterns(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    accepts: Callable[[Pattern], bool] = lambda pattern: True,
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
) -> Found:
    """Search the pattern of each layer, all together keeping exactly as many weights as the recipe's own pattern would.

    The model stays as it is; a copy of it is on `device`. The result is the same for the same inputs, seed, device and
    number of threads, also if the search was interrupted and resumed.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: what to do; its `search` and `prune` other than ``none``.
        seed: of what is drawn at random.
        device: where to compute, in float32.
        accepts: whether a pattern can be stored.
        progress: called before each block of the bank and each generation.
        journal: keeps the bank and the last generation, and gives those of an interrupted run.

    Raises:
        InputError: the model, a weight or the batches cannot be used, or no weights can move between its layers.
    """
    check_batches(model, batches)
    model.eval()
    device = torch.device(device)
    blocks = list_blocks(model, recipe, {})
    kind = ALGORITHMS[recipe.search]
    choices = list_choices(blocks, kind.reach, accepts)
    uniform = (0,) * len(choices)
    if not any(exchange(choices, uniform, stage, random.Random(seed)) for stage in range(len(SHARES))):
        raise InputError(
            f"no weights can move between the layers at pattern {recipe.pattern}; choose another, or search=none"
        )
    bank = build_bank(model, blocks, choices, batches, recipe, device=device, progress=progress, journal=journal)
    scorer = Scorer(model, choices, bank, cut_parts(batches, recipe.search_tokens, seed), device)
    algorithm: Algorithm = kind(choices, scorer, recipe.search_effort, seed)

    finished = journal.recall("search", 0) if journal else None
    start = tuple(finished[1]["best"]) if finished else uniform
    runs = scorer.run(start, range(scorer.parts))
    scorer.adopt(start, runs)
    state = State.read(finished[1]) if finished else State.start(uniform, scorer.mean_kl(runs))
    while state.generation < algorithm.generations:
        stage = f"search: best KL so far {state.kl:.4f}, uniform {state.uniform_kl:.4f}"
        progress(stage, state.generation, algorithm.generations)
        tokens = state.tokens - scorer.tokens_run
        state = algorithm.live(state)
        state = replace(state, generation=state.generation + 1, tokens=tokens + scorer.tokens_run)
        if journal:
            journal.keep("search", 0, {}, state.to_json())
    patterns = {choice.name: choice.patterns[level] for choice, level in zip(choices, state.best, strict=True)}
    return Found(patterns, state.uniform_kl, state.kl, state.evaluations, state.tokens)

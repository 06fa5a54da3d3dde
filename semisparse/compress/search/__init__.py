"""Search how to spread density over the layers: more weights where they matter, as many in all."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.journal import Journal
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.bank import Stored, build_bank, note_stored, read_stored
from semisparse.compress.search.evolution import Evolution
from semisparse.compress.search.rheosparse import RheoSparse
from semisparse.compress.search.score import Scorer, cut_parts
from semisparse.compress.search.space import SHARES, exchange, list_choices
from semisparse.compress.search.state import Algorithm, State
from semisparse.compress.walk import list_blocks
from semisparse.errors import InputError
from semisparse.patterns import Pattern

ALGORITHMS: dict[str, type[Algorithm]] = {"evolution": Evolution, "rheosparse": RheoSparse}
"""By the recipe's key."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        patterns: of each layer, by module name.
        weights: pruned to these, by module name: the ones that were scored. Pruning again, on the outputs of layers
            that have changed since, gives others, which may be worse (LOG.md).
        uniform_kl: KL(dense || candidate) of the uniform patterns on the search's tokens, mean in nats a token.
        kl: the same of `weights`.
        evaluations: candidates scored, on some of the tokens or all.
        tokens: tokens that these were run on.
    """

    patterns: Mapping[str, Pattern]
    weights: Mapping[str, Stored] = field(compare=False, repr=False)
    uniform_kl: float
    kl: float
    evaluations: int
    tokens: int

    def measured(self) -> dict[str, float]:
        """Give all but the layers, for the checkpoint."""
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
    choices = list_choices(blocks, kind.reach(recipe), accepts)
    uniform = (0,) * len(choices)
    if not any(exchange(choices, uniform, stage, random.Random(seed)) for stage in range(len(SHARES))):
        raise InputError(
            f"no weights can move between the layers at pattern {recipe.pattern}; choose another, or search=none"
        )
    parts = cut_parts(batches, recipe.search_tokens, seed)
    state = State.start(uniform)
    held: dict[str, Stored] = {}
    for number in range(kind.passes(recipe)):
        finished = journal.recall("pass", number) if journal else None
        if finished:
            state, held = _read_pass(*finished)
            continue
        offered = kind.offered(choices, state.best, number, recipe)
        of_bank: dict[str, Any] = {"number": number, "device": device, "progress": progress, "journal": journal}
        bank = build_bank(model, blocks, offered, state.best, held, batches, recipe, **of_bank)
        scorer = Scorer(model, offered, bank, parts, device)
        algorithm = kind(offered, scorer, recipe, seed, number)
        state = _live_through(number, algorithm, scorer, state, progress, journal)
        held = {choice.name: bank[choice.name][level] for choice, level in zip(choices, state.best, strict=True)}
        if journal:
            _keep_pass(journal, number, state, held)
    patterns = {choice.name: choice.patterns[level] for choice, level in zip(choices, state.best, strict=True)}
    return Found(patterns, held, state.uniform_kl, state.kl, state.evaluations, state.tokens)


def _live_through(
    number: int,
    algorithm: Algorithm,
    scorer: Scorer,
    state: State,
    progress: Progress,
    journal: Journal | None,
) -> State:
    """Live through the generations of a pass, from the state that the one before left, or an interrupted run did."""
    noted = journal.recall("search", number) if journal else None
    state = State.read(noted[1]) if noted else state
    runs = scorer.run(state.best, range(scorer.parts))
    scorer.adopt(state.best, runs)
    if state.generation == 0:
        kl = scorer.mean_kl(runs)
        state = replace(state, kl=kl, uniform_kl=kl)
    while state.generation < algorithm.end:
        stage = f"search: best KL so far {state.kl:.4f}, uniform {state.uniform_kl:.4f}"
        progress(stage, state.generation, algorithm.generations)
        tokens = state.tokens - scorer.tokens_run
        state = algorithm.live(state)
        state = replace(state, generation=state.generation + 1, tokens=tokens + scorer.tokens_run)
        if journal:
            journal.keep("search", number, {}, state.to_json())
    return state


def _keep_pass(journal: Journal, number: int, state: State, held: Mapping[str, Stored]) -> None:
    tensors: dict[str, Tensor] = {}
    layers = [note_stored(stored, tensors, name) for name, stored in held.items()]
    journal.keep("pass", number, tensors, {"state": state.to_json(), "layers": layers})


def _read_pass(tensors: dict[str, Tensor], notes: Mapping[str, Any]) -> tuple[State, dict[str, Stored]]:
    held = {layer["name"]: read_stored(layer, tensors, layer["name"]) for layer in notes["layers"]}
    return State.read(notes["state"]), held

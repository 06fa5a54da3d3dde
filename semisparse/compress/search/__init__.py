"""Search how to distribute density over the linear layers: more weights where they matter, the same number in all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisparse.compress.calibration import check_batches
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.journal import Journal
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.recipe import Recipe
from semisparse.compress.report import Progress
from semisparse.compress.search.anew import PrunedAnew
from semisparse.compress.search.bank import build_bank, prune_densities
from semisparse.compress.search.evolution import Evolution
from semisparse.compress.search.masked import MaskedWeight, masked_from_json, masked_to_json
from semisparse.compress.search.profile import REACH, most_candidates, search_profile
from semisparse.compress.search.rheosparse import RheoSparse
from semisparse.compress.search.score import Scorer, scoring_batches
from semisparse.compress.search.space import STAGE_STRIDES, LinearSpace, kept_weights, search_space, switch_levels
from semisparse.compress.search.state import Algorithm, State
from semisparse.compress.search.streaming import scorer_type
from semisparse.errors import InputError
from semisparse.patterns import Pattern

ALGORITHMS: dict[str, type[Algorithm]] = {"evolution": Evolution, "rheosparse": RheoSparse}
"""The algorithms over banks, by the value of the recipe's key `search`. Of its other values, ``profile`` is searched
without a bank, and ``joint`` by joint.py."""

PROFILE_TOKENS = 65_536
"""Calibration tokens on which ``search=profile`` prunes its candidates. The model is then pruned to the best candidate
on all calibration tokens."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        patterns: the pattern of each linear layer, by module name.
        weights: the weights pruned to these patterns, by module name: the same weights that were scored. Pruning again
            would give other weights, because the layers' inputs have changed since, and these may be worse
            (docs/experiments/search.md). Empty where candidates were pruned on a part of the text: then the model is to
            be pruned to `patterns`.
        uniform_kl: KL(dense || candidate) of the uniform patterns on the search's tokens, mean in nats per token.
        kl: the same for `weights`.
        evaluations: number of candidates scored, on all or some of the tokens.
        tokens: number of tokens run through the model to score them.
    """

    patterns: Mapping[str, Pattern]
    weights: Mapping[str, MaskedWeight] = field(compare=False, repr=False)
    uniform_kl: float
    kl: float
    evaluations: int
    tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the numbers, for the checkpoint."""
        return {"uniform_kl": self.uniform_kl, "kl": self.kl, "evaluations": self.evaluations, "tokens": self.tokens}


def search_patterns(
    model: nn.Module,
    batches: Sequence[Tensor],
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    can_store: Callable[[Pattern], bool] = lambda pattern: True,
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
    ranks: Ranks | None = None,
    offload: Path | None = None,
    streams: bool = False,
) -> SearchResult:
    """Search the pattern of each linear layer; together they keep exactly as many weights as the recipe's pattern.

    With ``search=profile`` they may keep fewer, by less than a level of the smallest linear layer.

    The model is not changed. The same inputs, seed, device and number of threads give the
    same result, also after an interruption.

    Args:
        model: a transformers causal language model.
        batches: calibration token ids, each [batch, tokens] int64.
        recipe: its `search` is neither ``none`` nor ``joint``, its `prune` not ``none``.
        seed: seed of everything drawn at random.
        device: where to compute, in float32.
        can_store: whether the format can store a pattern.
        progress: called before each decoder layer of a bank (bank.py) and before each generation.
        journal: stores banks and generations, and provides those of an interrupted run.
        ranks: the processes that search; by default this one.
        offload: a directory for hidden states, as in `compress_decoder_layers`.
        streams: whether candidates over banks are scored with one decoder layer at a time on the device, instead of the
            whole model; the result is the same.

    Raises:
        InputError: the model, a weight or the batches cannot be used, or no weights can move between linear layers.
    """
    check_batches(model, batches)
    model.eval()
    device, ranks = torch.device(device), ranks or Ranks()
    layers = list_decoder_layers(model, recipe, {})
    algorithm_type = ALGORITHMS.get(recipe.search)
    space = search_space(layers, algorithm_type.reach(recipe) if algorithm_type else REACH, can_store)
    uniform = (0,) * len(space)
    if not any(switch_levels(space, uniform, stage, random.Random(seed)) for stage in range(len(STAGE_STRIDES))):
        raise InputError(
            f"no weights can move between the linear layers at pattern {recipe.pattern}; "
            "choose another pattern, or search=none"
        )
    token_batches = scoring_batches(batches, recipe.search_tokens, seed)
    if algorithm_type is None:
        some = sample(batches, PROFILE_TOKENS)
        keep = len(some) == len(batches)
        run = (device, most_candidates(space), progress, journal, ranks, offload, keep)
        anew = PrunedAnew(model, layers, space, some, token_batches, recipe, *run)
        return _search_profile(space, anew)
    state = State.start(uniform)
    best_weights: dict[str, MaskedWeight] = {}
    for number in range(algorithm_type.passes(recipe)):
        finished = journal.load("pass", number) if journal else None
        if finished:
            state, best_weights = _read_pass(*finished)
            continue
        pass_space = algorithm_type.pass_space(space, state.best, number, recipe)
        bank = build_bank(
            model,
            layers,
            pass_space,
            state.best,
            best_weights,
            batches,
            recipe,
            number=number,
            device=device,
            progress=progress,
            journal=journal,
            prune=prune_densities,
            ranks=ranks,
            offload=offload,
        )
        scorer = scorer_type(streams)(model, pass_space, bank, token_batches, device, ranks)
        algorithm = algorithm_type(pass_space, scorer, recipe, seed, number)
        state = _run_pass(number, algorithm, scorer, state, progress, journal)
        best_weights = {linear.name: bank[linear.name][level] for linear, level in zip(space, state.best, strict=True)}
        if journal:
            _save_pass(journal, number, state, best_weights)
    patterns = {linear.name: linear.patterns[level] for linear, level in zip(space, state.best, strict=True)}
    return SearchResult(patterns, best_weights, state.uniform_kl, state.kl, state.evaluations, state.tokens)


def sample(batches: Sequence[Tensor], tokens: int) -> Sequence[Tensor]:
    """Return evenly spaced batches: of all batches the fraction that ``tokens`` is of all tokens, rounded up."""
    held = sum(batch.numel() for batch in batches)
    count = math.ceil(len(batches) * min(1.0, tokens / held))
    return [batches[number * len(batches) // count] for number in range(count)]


def _search_profile(space: Sequence[LinearSpace], anew: PrunedAnew) -> SearchResult:
    """Run ``search=profile``; return the best candidate that it pruned."""
    search_profile(space, anew.kls_of, kept_weights(space, (0,) * len(space)))
    best, first = anew.best, anew.evaluations[0]
    patterns = {linear.name: linear.patterns[level] for linear, level in zip(space, best.candidate, strict=True)}
    tokens = sum(evaluation.tokens for evaluation in anew.evaluations)
    return SearchResult(patterns, best.weights, first.kl, best.kl, len(anew.evaluations), tokens)


def _run_pass(
    number: int,
    algorithm: Algorithm,
    scorer: Scorer,
    state: State,
    progress: Progress,
    journal: Journal | None,
) -> State:
    """Run the generations of a pass, from the given state or from that of an interrupted run."""
    saved = journal.load("search", number) if journal else None
    state = State.from_json(saved[1]) if saved else state
    scores = scorer.score(state.best, range(scorer.batches))
    scorer.set_parent(state.best, scores)
    if state.generation == 0:
        kl = scorer.mean_kl(scores)
        state = replace(state, kl=kl, uniform_kl=kl)
    while state.generation < algorithm.end:
        stage = f"search: best KL so far {state.kl:.4f}, uniform {state.uniform_kl:.4f}"
        progress(stage, state.generation, algorithm.generations)
        tokens = state.tokens - scorer.tokens_run
        state = algorithm.next_generation(state)
        state = replace(state, generation=state.generation + 1, tokens=tokens + scorer.tokens_run)
        if journal:
            journal.save("search", number, {}, state.to_json())
    return state


def _save_pass(journal: Journal, number: int, state: State, weights: Mapping[str, MaskedWeight]) -> None:
    tensors: dict[str, Tensor] = {}
    layers = [masked_to_json(masked, tensors, name) for name, masked in weights.items()]
    journal.save("pass", number, tensors, {"state": state.to_json(), "layers": layers})


def _read_pass(tensors: dict[str, Tensor], notes: Mapping[str, Any]) -> tuple[State, dict[str, MaskedWeight]]:
    weights = {layer["name"]: masked_from_json(layer, tensors, layer["name"]) for layer in notes["layers"]}
    return State.from_json(notes["state"]), weights

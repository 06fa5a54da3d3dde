"""Searches lower the KL, keep the budget to the weight, repeat bit for bit and survive interruptions."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from semisparse.compress import Journal, Recipe, compress_blocks
from semisparse.compress.search import Found, search_patterns
from semisparse.compress.search.rheosparse import RheoSparse
from semisparse.compress.search.space import SHARES, kept_weights, list_choices
from semisparse.compress.search.state import State
from semisparse.compress.walk import list_blocks
from semisparse.errors import InputError, RecipeError
from semisparse.patterns import parse_pattern
from tests.compress.search.small import calibration, mean_kl, recipe, regular_model, sharp_model

SEARCHES = ["evolution", "rheosparse"]


def search(plan: Recipe, seed: int = 0, **options: object) -> Found:
    return search_patterns(sharp_model(), calibration(), plan, seed=seed, **options)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *(("evolution", pattern) for pattern in ("32:64", "4:8", "16:32v4", "g4@50%/row", "g4@50%", "70%", "50%/row")),
        ("rheosparse", "32:64"),
        ("rheosparse", "70%"),
    ],
)
def test_the_compressed_model_keeps_exactly_as_many_weights(name: str, pattern: str):
    plan = recipe(name, pattern, effort=48)
    found = search(plan)
    assert found.kl <= found.uniform_kl
    if pattern == "g4@50%/row":  # 5 % are to be had; in layers of 24 columns windows leave little to exchange
        assert found.kl < found.uniform_kl
    model = sharp_model()
    budget = kept = 0
    for report in compress_blocks(model, calibration(), plan, patterns=found.patterns, pruned=found.weights):
        weight = model.get_submodule(report.name).weight
        assert report.pattern == str(found.patterns[report.name])
        assert int(weight.count_nonzero()) <= parse_pattern(report.pattern).kept(tuple(weight.shape))
        kept += parse_pattern(report.pattern).kept(tuple(weight.shape))
        budget += parse_pattern(pattern).kept(tuple(weight.shape))
    assert kept == budget
    assert (len(set(map(str, found.patterns.values()))) > 1) == (found.kl < found.uniform_kl)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_same_seed_finds_the_same_and_another_does_not(name: str):
    plan = recipe(name, "4:8")
    found = search(plan)
    again = search(plan)
    assert again == found
    assert all(torch.equal(stored.values, again.weights[layer].values) for layer, stored in found.weights.items())
    assert search(plan, seed=1).uniform_kl != found.uniform_kl  # other tokens


def test_the_compressed_model_is_what_was_scored():
    """To the weight: through all banks, and whatever the layers before it have become since it was pruned."""
    plan = replace(recipe(effort=48), search_tokens=10**6)
    found = search(plan)
    assert found.kl < found.uniform_kl
    dense, sparse = sharp_model(), sharp_model()
    compress_blocks(sparse, calibration(), plan, patterns=found.patterns, pruned=found.weights)
    assert mean_kl(dense, sparse, calibration()) == pytest.approx(found.kl, rel=1e-3)  # float32 through two blocks
    pruned_again = sharp_model()
    compress_blocks(pruned_again, calibration(), plan, patterns=found.patterns)
    assert mean_kl(dense, pruned_again, calibration()) != pytest.approx(found.kl, rel=1e-3)


class Interrupted(Exception):
    pass


@cache
def uninterrupted(name: str) -> Found:
    return search(recipe(name, effort=30))


@pytest.mark.parametrize(
    ("name", "calls"),
    [*(("rheosparse", calls) for calls in (2, 5)), *(("evolution", calls) for calls in (2, 4, 5, 8, 12))],
)
def test_resumed_at_any_call_of_progress(name: str, calls: int, tmp_path: Path):
    """In a bank and in the search itself; evolution has two generations for each of three banks."""
    stages: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if len(stages) == calls:
            raise Interrupted

    plan = recipe(name, effort=30)
    whole = uninterrupted(name)
    with pytest.raises(Interrupted):
        search(plan, progress=interrupt, journal=Journal(tmp_path, {}))
    resumed: list[int] = []
    again = search(plan, progress=lambda _, done, __: resumed.append(done), journal=Journal(tmp_path, {}))
    assert replace(again, evaluations=0, tokens=0) == replace(whole, evaluations=0, tokens=0)
    assert again.evaluations == whole.evaluations
    assert again.tokens == whole.tokens
    of_pass, in_pass = divmod(calls - 1, 4) if name == "evolution" else (0, calls - 1)
    if in_pass >= 2:
        # Two blocks of the bank, then the generation that was interrupted.
        assert resumed[2] == 2 * of_pass + in_pass - 2


def test_progress_tells_the_best_so_far():
    told: list[tuple[str, int, int]] = []
    found = search(recipe(), progress=lambda *what: told.append(what))
    of_banks = [what for what in told if what[0] == "every layer at every density"]
    assert [done for _, done, _ in of_banks] == [0, 1] * 3
    of_search = [what for what in told if what not in of_banks]
    assert [done for _, done, _ in of_search] == list(range(of_search[0][2]))
    best = [float(stage.split("best KL so far ")[1].split(",")[0]) for stage, _, _ in of_search]
    assert best == sorted(best, reverse=True)
    assert best[0] == pytest.approx(found.uniform_kl, abs=5e-5)


def test_effort_is_what_is_spent():
    """In candidates scored on all tokens, within one generation."""
    for name in SEARCHES:
        once = sum(batch.numel() for batch in calibration())
        plan = replace(recipe(name), search_tokens=10**6, search_effort=60)
        assert 0.7 * 60 * once <= search(plan).tokens <= 1.2 * 60 * once  # padding is run, too


def test_genes_are_letters_and_segments_keep_their_budget():
    blocks = list_blocks(regular_model(), recipe(), {})
    choices = list_choices(blocks, 1, lambda _: True)

    class Blind:
        parts = 1

        def run(self, levels, parts):
            seen.append(levels)
            return [0.0]

        def mean_kl(self, runs):
            return 1 - len(seen) / 1000  # the later the better

    state = State.start((0,) * len(choices), 1.0)
    algorithm = RheoSparse(choices, Blind(), recipe(effort=60), seed=0, number=0)
    for generation in range(algorithm.generations):
        seen: list[tuple[int, ...]] = []
        centre = state.best if generation % 2 == 0 else state.pool[0]
        state = replace(algorithm.live(replace(state, generation=generation)), kl=1.0)
        assert len(seen) == 10
        for levels in seen:
            step = SHARES[generation // 2]
            assert {(a - b) // step for a, b in zip(levels, centre, strict=True)} <= {-1, 0, 1}
            assert all((a - b) % step == 0 for a, b in zip(levels, centre, strict=True))
            for name in {choice.segment for choice in choices}:
                segment = [i for i, choice in enumerate(choices) if choice.segment == name]
                assert kept_weights([choices[i] for i in segment], tuple(levels[i] for i in segment)) == sum(
                    choices[i].kept[0] for i in segment
                )
        assert any(levels != centre for levels in seen)


def test_what_cannot_be_searched():
    with pytest.raises(InputError, match="no weights can move between the layers at pattern 64:64"):
        search(recipe(pattern="64:64"))
    with pytest.raises(InputError, match="needs calibration text"):
        search_patterns(sharp_model(), [], recipe(), seed=0)
    for key, value in (("search", "luck"), ("search_tokens", "many"), ("search_effort", 0)):
        with pytest.raises(RecipeError, match=f"recipe key '{key}'"):
            Recipe.read({key: value})


def test_a_state_survives_json():
    state = State(3, (1, -1), 0.5, 0.75, ((0, 0), (1, -1)), 10, 99)
    assert State.read(json.loads(json.dumps(state.to_json()))) == state

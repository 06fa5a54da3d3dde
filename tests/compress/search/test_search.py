"""Searches lower the KL, keep the budget to the weight, repeat bit for bit and survive interruptions."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from semisparse.compress import Journal, Recipe, compress_decoder_layers
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import ALGORITHMS, SearchResult, search_patterns
from semisparse.compress.search.score import BatchScore, Wanted
from semisparse.compress.search.space import STAGE_STRIDES, LinearSpace, kept_weights, search_space
from semisparse.compress.search.state import State
from semisparse.errors import InputError, RecipeError
from semisparse.patterns import parse_pattern
from tests.choosing import mostly_slow
from tests.compress.checking import Interrupted
from tests.compress.search.small import calibration, mean_kl, recipe, regular_model, sharp_model


def search(plan: Recipe, seed: int = 0, **options: object) -> SearchResult:
    return search_patterns(sharp_model(), calibration(), plan, seed=seed, **options)


class Progress(NamedTuple):
    stage: str
    done: int
    total: int


@cache
def searched(plan: Recipe) -> tuple[SearchResult, list[Progress]]:
    """The result of a search and all calls of its progress callback."""
    calls: list[Progress] = []
    return search(plan, progress=lambda *call: calls.append(Progress(*call))), calls


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *(("evolution", pattern) for pattern in ("16:32v4", "50%/row")),
        *(pytest.param("evolution", pattern, marks=pytest.mark.slow) for pattern in ("4:8", "g4@50%")),
        ("rheosparse", "32:64"),
        pytest.param("rheosparse", "70%", marks=pytest.mark.slow),
    ],
)
def test_the_compressed_model_keeps_exactly_as_many_weights(name: str, pattern: str):
    plan = recipe(name, pattern)
    result = searched(plan)[0]
    assert result.kl <= result.uniform_kl
    if pattern == "4:8":  # the search finds a better candidate; with windows and only 24 columns few weights can move
        assert result.kl < result.uniform_kl
    model = sharp_model()
    budget = kept = 0
    patterns, weights = result.patterns, result.weights
    for report in compress_decoder_layers(model, calibration(), plan, patterns=patterns, pruned=weights):
        weight = model.get_submodule(report.name).weight
        assert report.pattern == str(patterns[report.name])
        assert int(weight.count_nonzero()) <= patterns[report.name].kept(tuple(weight.shape))
        kept += patterns[report.name].kept(tuple(weight.shape))
        budget += parse_pattern(pattern).kept(tuple(weight.shape))
    assert kept == budget
    assert (len(set(map(str, patterns.values()))) > 1) == (result.kl < result.uniform_kl)


@pytest.mark.parametrize(("name", "pattern"), [("evolution", "4:8"), ("rheosparse", "70%")])
def test_the_same_seed_finds_the_same(name: str, pattern: str):
    plan = recipe(name, pattern)
    result, again = searched(plan)[0], search(plan)
    assert again == result
    assert all(torch.equal(masked.values, again.weights[layer].values) for layer, masked in result.weights.items())


def test_another_seed_scores_other_tokens():
    assert search(recipe(pattern="4:8"), seed=1).uniform_kl != searched(recipe(pattern="4:8"))[0].uniform_kl


def test_the_compressed_model_is_what_was_scored():
    """Its weights come from all three banks; each was pruned before the layers before it were final."""
    plan = replace(recipe(pattern="70%", effort=48), search_tokens=10**6)
    result = search(plan)
    assert result.kl < result.uniform_kl
    all_tokens = sum(batch.numel() for batch in calibration())
    assert 0.7 * 48 * all_tokens <= result.tokens <= 1.2 * 48 * all_tokens, "the effort, and padding"
    dense, sparse = sharp_model(), sharp_model()
    compress_decoder_layers(sparse, calibration(), plan, patterns=result.patterns, pruned=result.weights)
    assert mean_kl(dense, sparse, calibration()) == pytest.approx(result.kl, rel=1e-3)  # float32 through two layers
    pruned_again = sharp_model()
    compress_decoder_layers(pruned_again, calibration(), plan, patterns=result.patterns)
    assert mean_kl(dense, pruned_again, calibration()) != pytest.approx(result.kl, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "calls"), mostly_slow([("rheosparse", 5), *(("evolution", calls) for calls in (2, 4, 5, 8))], 0, 2)
)
def test_resumed_at_any_call_of_progress(name: str, calls: int, tmp_path: Path):
    """In a bank and between generations: each of the three passes has a bank of 2 layers and 2 generations."""
    plan = recipe(name, effort=30)
    started: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        started.append(stage)
        if len(started) == calls:
            raise Interrupted

    with pytest.raises(Interrupted):
        search(plan, progress=interrupt, journal=Journal(tmp_path, {}))
    resumed: list[int] = []
    again = search(plan, progress=lambda _, done, __: resumed.append(done), journal=Journal(tmp_path, {}))
    assert again == searched(plan)[0]
    finished_passes, call_in_pass = divmod(calls - 1, 4) if name == "evolution" else (0, calls - 1)
    if call_in_pass >= 2:  # after two calls for the bank comes the generation that was interrupted
        assert resumed[2] == 2 * finished_passes + call_in_pass - 2


def test_progress_reports_the_best_kl_so_far():
    result, calls = searched(recipe(pattern="4:8"))
    of_banks = [call for call in calls if call.stage == "pruning every layer in every way"]
    assert [call.done for call in of_banks] == [0, 1] * 3
    of_search = [call for call in calls if call not in of_banks]
    assert [call.done for call in of_search] == list(range(of_search[0].total))
    best = [float(call.stage.split("best KL so far ")[1].split(",")[0]) for call in of_search]
    assert best == sorted(best, reverse=True)
    assert best[0] == pytest.approx(result.uniform_kl, abs=5e-5)


class StubScorer:
    """Gives every candidate a lower KL than those before it, and keeps what was scored, and on how many batches."""

    batches = 16

    def __init__(self) -> None:
        self.scored: dict[tuple[int, ...], int] = defaultdict(int)

    def score_all(self, wanted: Wanted, keep_states: bool = True) -> list[list[BatchScore]]:
        return [self.score(*pair) for pair in wanted]

    def score(self, candidate: tuple[int, ...], batches: range | list[int]) -> list[BatchScore]:
        self.scored[candidate] += len(batches)
        return [BatchScore(1 / len(self.scored), []) for _ in batches]

    def mean_kl(self, scores: list[BatchScore]) -> float:
        return sum(score.kl for score in scores) / self.batches

    def set_parent(self, candidate: tuple[int, ...], scores: list[BatchScore]) -> None:
        pass


@cache
def regular_space() -> list[LinearSpace]:
    return search_space(list_decoder_layers(regular_model(), recipe(), {}), 1, lambda _: True)


@pytest.mark.parametrize("effort", [60, 192])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_effort_is_spent(name: str, effort: int):
    """Counted in candidates scored on all batches, up to one generation more or less."""
    space, plan = regular_space(), recipe(name, effort=effort)
    state, batches = State.start((0,) * len(space), 1.0), 0
    for number in range(ALGORITHMS[name].passes(plan)):
        scorer = StubScorer()
        algorithm = ALGORITHMS[name](space, scorer, plan, 0, number)
        while state.generation < algorithm.end:
            state = replace(algorithm.next_generation(state), generation=state.generation + 1)
        batches += sum(scorer.scored.values())
    generation = effort / algorithm.generations
    assert effort - generation <= batches / StubScorer.batches <= effort
    assert state.generation == algorithm.generations


def test_genes_are_letters_and_segments_keep_their_budget():
    space = regular_space()
    state = State.start((0,) * len(space), 1.0)
    scorer = StubScorer()
    algorithm = ALGORITHMS["rheosparse"](space, scorer, recipe(effort=60), seed=0, number=0)
    for generation in range(algorithm.generations):
        scorer.scored.clear()
        centre = state.best if generation % 2 == 0 else state.pool[0]
        state = replace(algorithm.next_generation(replace(state, generation=generation)), kl=1.0)
        assert sum(scorer.scored.values()) == 10 * scorer.batches
        stride = STAGE_STRIDES[generation // 2]
        for candidate in scorer.scored:
            assert {(a - b) / stride for a, b in zip(candidate, centre, strict=True)} <= {-1, 0, 1}
            for name in {layer.name_in_layer for layer in space}:
                segment = [i for i, layer in enumerate(space) if layer.name_in_layer == name]
                assert kept_weights([space[i] for i in segment], tuple(candidate[i] for i in segment)) == sum(
                    space[i].kept[0] for i in segment
                )
        assert set(scorer.scored) != {centre}


class ChoosyScorer(StubScorer):
    """Gives each candidate its distance from a goal as KL, the same on every batch."""

    def kl(self, candidate: tuple[int, ...]) -> float:
        return sum(abs(level - (4 if index % 3 else -12)) for index, level in enumerate(candidate))

    def score(self, candidate: tuple[int, ...], batches: range | list[int]) -> list[BatchScore]:
        self.scored[candidate] += len(batches)
        return [BatchScore(self.kl(candidate), []) for _ in batches]


def test_evolution_keeps_the_best_of_a_generation():
    space, scorer = regular_space(), ChoosyScorer()
    start = State.start((0,) * len(space), 1e9)
    state = ALGORITHMS["evolution"](space, scorer, recipe(effort=60), 0, 0).next_generation(start)
    assert len(scorer.scored) > 4
    assert state.best in scorer.scored
    assert state.kl == scorer.kl(state.best) == min(map(scorer.kl, scorer.scored))
    assert scorer.scored[state.best] == scorer.batches > min(scorer.scored.values()), "survivors see more batches"


def test_two_best_individuals_are_crossed_segment_by_segment(monkeypatch: pytest.MonkeyPatch):
    space, scorer = regular_space(), ChoosyScorer()
    algorithm = ALGORITHMS["rheosparse"](space, scorer, recipe(effort=120), 0, 0)
    start = State.start((0,) * len(space), 1e9)
    state = algorithm.next_generation(start)
    parents = sorted(scorer.scored, key=lambda candidate: (scorer.kl(candidate), candidate))[:2]
    assert state.pool == (start.best, *parents)
    assert state.best == parents[0]

    scorer.scored.clear()
    monkeypatch.setattr(algorithm, "_mutated", lambda child, *_: child)
    algorithm.next_generation(replace(state, generation=1))
    names = [layer.name_in_layer for layer in space]
    chosen = set()
    for child in scorer.scored:
        for name in set(names):
            segment = [i for i, other in enumerate(names) if other == name]
            genes = [tuple(candidate[i] for i in segment) for candidate in (child, *parents)]
            assert genes[0] in genes[1:]
            chosen |= {(name, genes.index(genes[0], 1))} if genes[1] != genes[2] else set()
    assert len(scorer.scored) > 2
    assert {parent for _, parent in chosen} == {1, 2}
    assert len(chosen) == 2 * len({name for name, _ in chosen}), "each segment comes from either parent"


def test_what_cannot_be_searched():
    with pytest.raises(InputError, match="no weights can move between the linear layers at pattern 64:64"):
        search(recipe(pattern="64:64"))
    with pytest.raises(InputError, match="needs calibration text"):
        search_patterns(sharp_model(), [], recipe(), seed=0)
    for key, value in (("search", "luck"), ("search_tokens", "many"), ("search_effort", 0)):
        with pytest.raises(RecipeError, match=f"recipe key '{key}'"):
            Recipe.read({key: value})


def test_a_state_survives_json():
    state = State(3, (1, -1), 0.5, 0.75, ((0, 0), (1, -1)), 10, 99)
    assert State.from_json(json.loads(json.dumps(state.to_json()))) == state

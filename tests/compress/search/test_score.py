"""A candidate's score against the forward pass of a model that holds its weights."""

import copy
import random

import pytest
import torch
from transformers import PreTrainedModel

from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search.bank import Bank
from semisparse.compress.search.masked import to_masked
from semisparse.compress.search.score import BATCHES, Scorer, scoring_batches, split_sequences
from semisparse.compress.search.space import Candidate, LinearSpace, search_space
from semisparse.nn import weight_of
from tests.choosing import mostly_slow
from tests.compress.search.small import REPORT, calibration, mean_kl, recipe, sharp_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def space_of(model: PreTrainedModel) -> list[LinearSpace]:
    return search_space(list_decoder_layers(model, recipe(), {}), 1, lambda _: True)


def small_bank(model: PreTrainedModel, space: list[LinearSpace]) -> Bank:
    """Weights pruned by magnitude: quick, and different at each level."""
    bank: Bank = {}
    for layer in space:
        weight = weight_of(model.get_submodule(layer.name))
        masks = {level: pattern.mask(weight.abs().float()) for level, pattern in layer.patterns.items()}
        bank[layer.name] = {level: to_masked(weight * mask, REPORT) for level, mask in masks.items()}
    return bank


def scorer_of(model: PreTrainedModel, space: list[LinearSpace], batches: int = BATCHES) -> Scorer:
    split = scoring_batches(calibration(), 10**6, seed=0, parts=batches)
    return Scorer(model, space, small_bank(model, space), split, DEVICE, Ranks())


def reference(model: PreTrainedModel, space: list[LinearSpace], candidate: Candidate) -> float:
    """The mean KL of a candidate."""
    dense = copy.deepcopy(model).float()
    sparse = copy.deepcopy(dense)
    for layer, level in zip(space, candidate, strict=True):
        weight = weight_of(sparse.get_submodule(layer.name))
        weight *= layer.patterns[level].mask(weight_of(model.get_submodule(layer.name)).abs().float())
    return mean_kl(dense, sparse, calibration())


@pytest.mark.parametrize("architecture", mostly_slow(["llama", "qwen3", "mistral", "opt", "gpt2"], 1, 3, 4))
def test_scores_are_kl_divergences(architecture: str):
    """There are few batches, so that some hold sequences of both lengths and are padded."""
    assert any((batch < 0).any() for batch in scoring_batches(calibration(), 10**6, seed=0, parts=3))
    model = sharp_model(architecture)
    space = space_of(model)
    scorer = scorer_of(model, space, batches=3)
    every = range(scorer.batches)
    rng = random.Random(0)
    uniform = (0,) * len(space)
    scorer.set_parent(uniform, scorer.score(uniform, every))
    for changes in (0, 1, 3):
        levels = list(uniform)
        for index in rng.sample(range(len(space)), changes):
            levels[index] = rng.choice([-7, -2, 3])
        candidate = tuple(levels)
        scores = scorer.score(candidate, every)
        expected = reference(model, space, candidate)
        assert expected > 1e-3
        assert scorer.mean_kl(scores) == pytest.approx(expected, rel=1e-3)  # float32 through two layers
    scorer.set_parent(candidate, scores)
    assert [score.kl for score in scorer.score(candidate, every)] == [score.kl for score in scores]
    expected = reference(model, space, uniform)
    assert scorer.mean_kl(scorer.score(uniform, every)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_skipped_layers_change_no_bit_and_do_not_run(architecture: str):
    model = sharp_model(architecture)
    space = space_of(model)
    skipping, whole = (scorer_of(model, space) for _ in range(2))
    uniform = (0,) * len(space)
    every = range(skipping.batches)
    skipping.set_parent(uniform, skipping.score(uniform, every))
    entered, ran = [], []
    skipping._layers[0].register_forward_pre_hook(lambda *_: entered.append(0))
    next(iter(skipping._layers[0].children())).register_forward_pre_hook(lambda *_: ran.append(0))
    late = (*uniform[:-1], 3)
    scores, expected = (scorer.score(late, every) for scorer in (skipping, whole))
    assert [score.kl for score in scores] == [score.kl for score in expected]
    for one, other in zip(scores, expected, strict=True):
        assert len(one.states) == len(other.states) == 2
        assert all(torch.equal(a, b) for a, b in zip(one.states, other.states, strict=True))
    assert (entered, ran) == ([0] * skipping.batches, [])
    assert "forward" not in vars(skipping._layers[0])


def test_the_parent_stays_assembled_after_an_error():
    model = sharp_model("llama")
    space = space_of(model)
    scorer = scorer_of(model, space)
    uniform = (0,) * len(space)
    scorer.set_parent(uniform, scorer.score(uniform, range(scorer.batches)))
    before = scorer.score(uniform, [0])[0].kl
    with pytest.raises(IndexError):
        scorer.score((*uniform[:-1], 3), [scorer.batches])
    assert scorer.score(uniform, [0])[0].kl == before


def test_batches_hold_the_number_of_tokens_to_score():
    batches = [torch.arange(400).view(40, 10), torch.arange(1000, 1300).view(10, 30)]
    scored = scoring_batches(batches, 200, seed=0)
    assert len(scored) <= BATCHES
    rows = [tuple(row[row >= 0].tolist()) for batch in scored for row in batch]
    assert len(rows) == len(set(rows))
    assert 200 <= sum(len(row) for row in rows) < 230
    assert set(rows) <= {tuple(row.tolist()) for batch in batches for row in batch}
    again = scoring_batches(batches, 200, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(scored, again, strict=True))
    assert sum(len(batch) for batch in scoring_batches(batches, 10**6, seed=0)) == 50


@pytest.mark.parametrize(
    ("wanted", "searched", "others"), [(100, (100, 130), (200, 230)), (1000, (233, 263), (437, 467))]
)
def test_a_search_and_the_comparison_of_its_results_have_no_sequence_in_common(
    wanted: int, searched: tuple[int, int], others: tuple[int, int]
):
    """Of 700 tokens, as many as are wanted and twice as many others, or a third and all others."""
    batches = [torch.arange(400).view(40, 10), torch.arange(1000, 1300).view(10, 30)]
    drawn = [[tuple(row.tolist()) for row in part] for part in split_sequences(batches, wanted, seed=0)]
    assert not set(drawn[0]) & set(drawn[1])
    for rows, (least, below) in zip(drawn, (searched, others), strict=True):
        assert least <= sum(map(len, rows)) < below
    if wanted == 100:  # with text enough, the search has those that a search without a comparison has
        alone = scoring_batches(batches, wanted, seed=0)
        assert set(drawn[0]) == {tuple(row[row >= 0].tolist()) for batch in alone for row in batch}


def test_of_two_sequences_each_gets_one_and_of_one_the_search():
    long, short = torch.arange(100), torch.arange(200, 205)
    for seed in range(4):
        one, other = split_sequences([long[None], short[None]], 1000, seed=seed)
        assert {len(one[0]), len(other[0])} == {100, 5}
    assert [len(part) for part in split_sequences([long[None]], 1000, seed=0)] == [1, 0]

"""A candidate's score against a plain forward of a model that holds its weights."""

import copy
import random

import pytest
import torch

from semisparse.compress.search.bank import Bank, store
from semisparse.compress.search.score import PARTS, Scorer, cut_parts
from semisparse.compress.search.space import Choice, Levels, list_choices
from semisparse.compress.walk import list_blocks
from semisparse.nn import weight_of
from tests.compress.search.small import REPORT, calibration, mean_kl, recipe, sharp_model
from tests.models import CONFIGS

CPU = torch.device("cpu")


def small_bank(model, choices: list[Choice]) -> Bank:
    """Weights with their smallest entries dropped: quick, and different at each level."""
    bank: Bank = {}
    for choice in choices:
        weight = weight_of(model.get_submodule(choice.name))
        masks = {level: found.mask(weight.abs().float()) for level, found in choice.patterns.items()}
        bank[choice.name] = {level: store(weight * mask, REPORT) for level, mask in masks.items()}
    return bank


def reference(model, choices: list[Choice], levels: Levels, batches: list[torch.Tensor]) -> float:
    """Mean KL of a candidate."""
    dense = copy.deepcopy(model).float()
    sparse = copy.deepcopy(dense)
    for choice, level in zip(choices, levels, strict=True):
        weight = weight_of(sparse.get_submodule(choice.name))
        weight *= choice.patterns[level].mask(weight_of(model.get_submodule(choice.name)).abs().float())
    return mean_kl(dense, sparse, batches)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_scores_are_kl_divergences(architecture: str):
    model = sharp_model(architecture)
    choices = list_choices(list_blocks(model, recipe(), {}), 1, lambda _: True)
    scorer = Scorer(model, choices, small_bank(model, choices), cut_parts(calibration(), 10**6, seed=0), CPU)
    every = range(scorer.parts)
    rng = random.Random(0)
    levels = (0,) * len(choices)
    scorer.adopt(levels, scorer.run(levels, every))
    for changes in (0, 1, 1, 1, 3):
        near = list(levels)
        for index in rng.sample(range(len(choices)), changes):
            near[index] = rng.choice([-7, -2, 3])
        runs = scorer.run(tuple(near), every)
        expected = reference(model, choices, tuple(near), calibration())
        assert expected > 1e-3
        assert scorer.mean_kl(runs) == pytest.approx(expected, rel=1e-3)  # float32 through two blocks
        if changes == 3:
            scorer.adopt(tuple(near), runs)
            assert [run.kl for run in scorer.run(tuple(near), every)] == [run.kl for run in runs]
    expected = reference(model, choices, levels, calibration())
    assert scorer.mean_kl(scorer.run(levels, every)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_skipped_blocks_change_no_bit_and_do_not_run(architecture: str):
    model = sharp_model(architecture)
    choices = list_choices(list_blocks(model, recipe(), {}), 1, lambda _: True)
    parts = cut_parts(calibration(), 10**6, seed=0)
    skipping, whole = (Scorer(model, choices, small_bank(model, choices), parts, CPU) for _ in range(2))
    levels = (0,) * len(choices)
    skipping.adopt(levels, skipping.run(levels, range(skipping.parts)))
    ran = []
    skipping._blocks[0].register_forward_pre_hook(lambda *_: ran.append(0))
    late = (*levels[:-1], 3)
    found, expected = (scorer.run(late, range(scorer.parts)) for scorer in (skipping, whole))
    assert [run.kl for run in found] == [run.kl for run in expected]
    for one, other in zip(found, expected, strict=True):
        assert len(one.states) == len(other.states) == 2
        assert all(torch.equal(a, b) for a, b in zip(one.states, other.states, strict=True))
    assert ran == [0] * skipping.parts  # the block is entered, but gives what is known instead of running
    assert "forward" not in vars(skipping._blocks[0])


def test_the_parent_stays_assembled_after_an_error(monkeypatch: pytest.MonkeyPatch):
    model = sharp_model("llama")
    choices = list_choices(list_blocks(model, recipe(), {}), 1, lambda _: True)
    scorer = Scorer(model, choices, small_bank(model, choices), cut_parts(calibration(), 10**6, seed=0), CPU)
    levels = (0,) * len(choices)
    scorer.adopt(levels, scorer.run(levels, range(scorer.parts)))
    before = scorer.run(levels, [0])[0].kl
    with pytest.raises(IndexError):
        scorer.run((*levels[:-1], 3), [scorer.parts])
    assert scorer.run(levels, [0])[0].kl == before


def test_parts_hold_the_tokens_asked_for():
    batches = [torch.arange(400).view(40, 10), torch.arange(1000, 1300).view(10, 30)]
    parts = cut_parts(batches, 200, seed=0)
    assert len(parts) <= PARTS
    rows = [tuple(row[row >= 0].tolist()) for part in parts for row in part]
    assert len(rows) == len(set(rows))
    assert 200 <= sum(len(row) for row in rows) < 230
    known = {tuple(row.tolist()) for batch in batches for row in batch}
    assert set(rows) <= known
    again = cut_parts(batches, 200, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert sum(len(part) for part in cut_parts(batches, 10**6, seed=0)) == 50

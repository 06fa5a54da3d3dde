"""Scores of a model whose decoder layers come to the device one at a time, against those of a whole copy."""

import copy
import itertools
import random
import weakref

import pytest
import torch

from semisparse.compress.decoder import copy_to
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.search import search_patterns, streaming
from semisparse.compress.search.score import Scorer, scoring_batches
from semisparse.compress.search.streaming import StreamingScorer
from tests.choosing import mostly_slow
from tests.compress.search import test_joint
from tests.compress.search.small import calibration, recipe, sharp_model
from tests.compress.search.test_score import DEVICE, small_bank, space_of


def same(one: list, other: list) -> bool:
    """Whether scores are equal, bit by bit, hidden states included."""
    pairs = list(zip(one, other, strict=True))
    assert all(len(a.states) == len(b.states) for a, b in pairs)
    kept = [(x, y) for a, b in pairs for x, y in zip(a.states, b.states, strict=True)]
    return all(a.kl == b.kl for a, b in pairs) and all(torch.equal(x, y) for x, y in kept)


@pytest.mark.parametrize(
    ("architecture", "at_a_time"),
    mostly_slow(itertools.product(["llama", "qwen3", "mistral", "opt", "gpt2"], [1, 10**9]), 0, 3, 4, 6, 9),
)
def test_scores_are_those_of_a_whole_copy(architecture: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch):
    """Without a parent and with one, of few batches and of all, some of them padded."""
    monkeypatch.setattr(streaming, "STATES", at_a_time)
    model = sharp_model(architecture)
    space, split = space_of(model), scoring_batches(calibration(), 10**6, seed=0, parts=3)
    bank, rng = small_bank(model, space), random.Random(0)
    before = copy.deepcopy(model.state_dict())
    scorers = [kind(model, space, bank, split, DEVICE, Ranks()) for kind in (Scorer, StreamingScorer)]
    uniform, every = (0,) * len(space), range(3)
    candidates = [tuple(rng.choice(list(layer.patterns)) for layer in space) for _ in range(3)]
    late = (*uniform[:-1], 3)
    first = [scorer.score_all([(uniform, every), (candidates[0], [2, 0])]) for scorer in scorers]
    assert all(map(same, *first))
    for scorer, (scores, _) in zip(scorers, first, strict=True):
        scorer.set_parent(uniform, [scores[0], scores[1]._replace(states=[]), scores[2]])
    wanted = [(late, every), (candidates[1], [1]), (candidates[2], []), (uniform, every)]
    for keep in (True, False):
        assert all(map(same, *[scorer.score_all(wanted, keep_states=keep) for scorer in scorers]))
    for scorer in scorers:
        scorer.set_parent(late, scorer.score(late, every))
    assert same(*[scorer.score(candidates[1], every) for scorer in scorers])
    assert scorers[0].tokens_run == scorers[1].tokens_run
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_device_holds_one_decoder_layer(monkeypatch: pytest.MonkeyPatch):
    model = sharp_model("llama")
    space, split = space_of(model), scoring_batches(calibration(), 10**6, seed=0, parts=3)
    scorer = StreamingScorer(model, space, small_bank(model, space), split, DEVICE, Ranks())
    copies: list[weakref.ref] = []

    def counted(*arguments: object) -> torch.nn.Module:
        alive = sum(copied() is not None for copied in copies)
        assert alive <= 1  # the last one, until this one takes its place
        layer = copy_to(*arguments)
        copies.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(streaming, "copy_to", counted)
    uniform = (0,) * len(space)
    scorer.set_parent(uniform, scorer.score(uniform, range(3)))
    assert len(copies) == 2
    assert sum(copied() is not None for copied in copies) == 0
    scorer.score_all([((*uniform[:-1], 3), [0]), ((*uniform[:-1], 2), [0, 1])])
    assert len(copies) == 3  # only the last decoder layer differs from the parent


@pytest.mark.parametrize("algorithm", ["evolution", "rheosparse"])
def test_a_search_finds_the_same(algorithm: str):
    plan = recipe(search=algorithm, search_effort=24)
    whole, streamed = (search_patterns(sharp_model(), calibration(), plan, seed=0, streams=it) for it in (False, True))
    assert whole == streamed
    assert whole.evaluations > 6


def test_a_joint_search_finds_the_same():
    assert test_joint.search(streams=True).metrics() == test_joint.searched().metrics()

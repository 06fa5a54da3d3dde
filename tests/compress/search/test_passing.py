"""A candidate's score, from decoder layers given one at a time, against that of a whole model."""

import copy
import random

import pytest
import torch

from semisparse.compress.decoder import decoder_layers
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.search.masked import to_dense
from semisparse.compress.search.passing import PassingScorer
from semisparse.compress.search.score import Scorer, scoring_batches
from semisparse.nn import weight_of
from tests.compress.search.small import calibration, sharp_model
from tests.compress.search.test_score import DEVICE, small_bank, space_of


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "opt", "gpt2"])
def test_scores_are_those_of_a_whole_model(architecture: str):
    """For two candidates, with batches that are padded: bit by bit on a CPU.

    On a GPU a matmul may be summed in another order: with gpt2 they were 2e-8 apart, with the others equal.
    """
    model = sharp_model(architecture)
    space, split = space_of(model), scoring_batches(calibration(), 10**6, seed=0, parts=3)
    bank, rng = small_bank(model, space), random.Random(0)
    whole, passing = Scorer(model, space, bank, split, DEVICE, Ranks()), PassingScorer(model, split, DEVICE, Ranks())
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        candidate = tuple(rng.choice(list(layer.patterns)) for layer in space)
        passing.begin()
        for index, layer in enumerate(decoder_layers(model)[1]):
            dense, pruned = (copy.deepcopy(layer).to(DEVICE, torch.float32) for _ in range(2))
            for linear, level in zip(space, candidate, strict=True):
                if linear.decoder_layer == index:
                    weight = weight_of(pruned.get_submodule(linear.name_in_layer))
                    weight.copy_(to_dense(bank[linear.name][level], weight))
            passing.pass_through(index, dense, pruned)
        expected = whole.mean_kl(whole.score(candidate, range(whole.batches)))
        assert passing.mean_kl() == (expected if DEVICE.type == "cpu" else pytest.approx(expected, rel=0, abs=1e-6))
        assert expected > 1e-4
    assert passing.tokens == whole.tokens_run // 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_decoder_layers_but_the_first_are_not_copied():
    model = sharp_model("llama")
    split = scoring_batches(calibration(), 100, seed=0)
    frame = PassingScorer(model, split, DEVICE, Ranks())._frame
    shared = {id(tensor) for tensor in frame.parameters()} & {id(tensor) for tensor in model.parameters()}
    layers = decoder_layers(model)[1]
    assert shared == {id(tensor) for layer in layers[1:] for tensor in layer.parameters()}
    assert len(layers) > 1
    assert all(tensor.dtype == torch.float32 for tensor in frame.parameters() if id(tensor) not in shared)

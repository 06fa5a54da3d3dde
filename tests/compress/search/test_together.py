"""Candidates that are pruned side by side, against each alone."""

import random
from functools import partial

import pytest
import torch
from torch import nn

from semisparse.compress import Recipe
from semisparse.compress.distributed.ranks import Ranks
from semisparse.compress.layers import list_decoder_layers
from semisparse.compress.search import together
from semisparse.compress.search.bank import build_bank, prune_densities
from semisparse.compress.search.space import Candidate, LinearSpace, search_space
from semisparse.compress.search.together import prune_side_by_side
from tests.compress.search.small import calibration, recipe, sharp_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Pruned = dict[tuple[int, int], dict[str, torch.Tensor]]
"""The weights of a decoder layer by number of the candidate and index of the decoder layer."""


def candidates_of(space: list[LinearSpace]) -> list[Candidate]:
    rng = random.Random(0)
    return [tuple(rng.choice(list(linear.patterns)) for linear in space) for _ in range(3)]


def side_by_side(model: nn.Module, plan: Recipe, space: list[LinearSpace], candidates: list[Candidate]) -> Pruned:
    found: Pruned = {}

    def keep(number: int, index: int, dense: nn.Module, pruned: nn.Module) -> None:
        found[number, index] = {name: weight.clone() for name, weight in pruned.state_dict().items()}

    patterns = [
        {linear.name: linear.patterns[level] for linear, level in zip(space, candidate, strict=True)}
        for candidate in candidates
    ]
    how = {"device": DEVICE, "progress": lambda done, total: None, "ranks": Ranks(), "offload": None}
    prune_side_by_side(model, list_decoder_layers(model, plan, {}), patterns, calibration(), plan, on_layer=keep, **how)
    return found


def each_alone(model: nn.Module, plan: Recipe, space: list[LinearSpace], candidates: list[Candidate]) -> Pruned:
    found: Pruned = {}

    def keep(index: int, dense: nn.Module, pruned: nn.Module, number: int) -> None:
        found[number, index] = {name: weight.clone() for name, weight in pruned.state_dict().items()}

    how = {"device": DEVICE, "journal": None, "ranks": Ranks(), "offload": None, "prune": prune_densities}
    for number, candidate in enumerate(candidates):
        levels = [linear.restricted_to(level, 0, 0) for linear, level in zip(space, candidate, strict=True)]
        build_bank(
            model,
            list_decoder_layers(model, plan, {}),
            levels,
            candidate,
            {},
            calibration(),
            plan,
            number=number,
            progress=lambda stage, done, total: None,
            on_layer=partial(keep, number=number),
            **how,
        )
    return found


@pytest.mark.parametrize("target", ["residual", "local"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_each_gets_what_it_gets_alone(architecture: str, target: str):
    plan = recipe("profile", "4:8").with_changes({"target": target})
    model = sharp_model(architecture)
    space = search_space(list_decoder_layers(model, plan, {}), 3, lambda pattern: True)
    candidates = candidates_of(space)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found, expected = (prune(model, plan, space, candidates) for prune in (side_by_side, each_alone))
    assert found.keys() == expected.keys()
    for key, weights in expected.items():
        for name, weight in weights.items():
            assert torch.equal(found[key][name], weight), (key, name)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("known", [True, False])
def test_the_last_linear_layer_s_output_may_end_a_decoder_layer(known: bool, monkeypatch: pytest.MonkeyPatch):
    """It is not computed again, unless the sum is something else than the decoder layer's output."""
    plan, model = recipe("profile", "4:8"), sharp_model("llama")
    space = search_space(list_decoder_layers(model, plan, {}), 3, lambda pattern: True)
    real, sums = together._last_sum, []

    def last_sum(*arguments):
        sums.append(real(*arguments))
        return sums[-1] if known else sums[-1] + 1

    monkeypatch.setattr(together, "_last_sum", last_sum)
    candidates = candidates_of(space)
    found, expected = side_by_side(model, plan, space, candidates), each_alone(model, plan, space, candidates)
    assert all(
        torch.equal(found[key][name], weight) for key, weights in expected.items() for name, weight in weights.items()
    )
    batches, layers = len(calibration()), len(list_decoder_layers(model, plan, {}))
    assert batches > 1
    assert len(sums) == (layers - 1) * len(candidates) * (batches if known else 1)

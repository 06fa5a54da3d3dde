"""Exchanges within windows against trying each one."""

import itertools

import pytest
import torch

from semisparse.compress.prune import prune_layer, swaps
from semisparse.compress.prune.swaps import swap_weights
from semisparse.compress.recipe import Recipe
from semisparse.errors import RecipeError
from semisparse.patterns import NM, parse_pattern
from tests.compress.prune.test_layer import inputs, output_error, random_weight, statistics_of
from tests.compress.prune.test_refine import random_problem


def loss_of(weight: torch.Tensor, hessian: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Return each row's loss."""
    error = weight - goal
    return ((error @ hessian) * error).sum(1)


def best_exchange(weight: torch.Tensor, kept: torch.Tensor, hessian: torch.Tensor, goal: torch.Tensor) -> float:
    """Return the lowest loss of one row that an exchange in its only window leads to, each solved by itself."""
    found = []
    for out, into in itertools.product(kept.nonzero().flatten(), (~kept).nonzero().flatten()):
        changed = weight.clone()
        changed[out] = changed[into] = 0
        slope = ((changed - goal) @ hessian)[into]
        changed[into] = -slope / hessian[into, into]
        found.append(loss_of(changed[None], hessian, goal[None]).item())
    return min(found)


def test_the_first_exchange_is_the_best_of_all(monkeypatch):
    monkeypatch.setattr(swaps, "SWEEPS", 1)
    kept, hessian, goal = random_problem(9, 8, 0)
    kept[:, 0], kept[:, 1] = True, False
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    weight = goal * kept
    swapped, mask = swap_weights(weight, kept, hessian, goal, order, window=8)
    before, after = loss_of(weight, hessian, goal), loss_of(swapped, hessian, goal)
    best = torch.tensor([best_exchange(*row, hessian, aim) for *row, aim in zip(weight, kept, goal, strict=True)])
    torch.testing.assert_close(after, torch.minimum(before, best.double()))
    assert (after < before).any()
    assert torch.equal(mask.sum(1), kept.sum(1))
    assert not swapped[~mask].any()


@pytest.mark.parametrize("rows", [3, 4096])
def test_windows_of_the_weights_own_columns_keep_their_counts(monkeypatch, rows):
    """Columns are in pruning order; 20 columns in windows of 8 leave a short one."""
    monkeypatch.setattr(swaps, "ROWS", rows)
    _, hessian, goal = random_problem(10, 20, 3)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    pattern = NM(4, 8)
    kept = pattern.mask(goal.abs())[:, order]
    hessian, goal = hessian[order][:, order], goal[:, order]
    swapped, mask = swap_weights(goal * kept, kept, hessian, goal, order, window=8)
    assert (mask != kept).any()
    own = mask[:, order.argsort()]
    assert pattern.violation(own) is None
    assert torch.equal(own[:, 16:].sum(1), kept[:, order.argsort()][:, 16:].sum(1))
    assert (loss_of(swapped, hessian, goal) <= loss_of(goal * kept, hessian, goal) + 1e-9).all()


@pytest.mark.parametrize(
    "setting", [{"pattern": "50%"}, {"prune": "wanda"}, {"search": "joint", "targets": (("bits", 3.0),)}]
)
def test_what_has_no_windows_is_refused(setting):
    Recipe(pattern="2:4", refine="swaps")
    with pytest.raises(RecipeError, match=r"refine=swaps exchanges weights within the windows of an n:m pattern"):
        Recipe(**{"pattern": "2:4", "refine": "swaps", **setting})


@pytest.mark.parametrize("quant", ["none", "w4"])
@pytest.mark.parametrize("pattern", ["2:4", "8:16"])
def test_a_layer_loses_less_and_obeys_its_pattern(pattern, quant):
    weight, x = random_weight(), inputs()
    pruned = {
        refine: prune_layer(
            weight, parse_pattern(pattern), statistics_of(x), Recipe(pattern=pattern, refine=refine, quant=quant)
        ).weight
        for refine in ("cg", "swaps")
    }
    assert parse_pattern(pattern).violation(pruned["swaps"] != 0) is None
    errors = {refine: output_error(found, weight, x) for refine, found in pruned.items()}
    assert errors["swaps"] < errors["cg"]

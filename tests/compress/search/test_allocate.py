"""Allocations keep every limit, and no allocation that keeps them has a lower loss (all are tried)."""

import itertools
import random

import pytest
import torch

from semisparse.compress.search.allocate import Unreachable, _by_moves, allocate


def problem(seed: int) -> tuple[list[list[float]], list[list[dict[str, float]]], dict[str, float]]:
    rng = random.Random(seed)
    options = [rng.randint(1, 5) for _ in range(rng.randint(2, 5))]
    losses = [[rng.random() ** 3 - 0.1 for _ in range(count)] for count in options]
    costs = [[{"bytes": rng.random(), "time": rng.random()} for _ in range(count)] for count in options]
    return losses, costs, {"bytes": 0.5 * len(options), "time": 0.55 * len(options)}


def total(costs: list[list[dict[str, float]]], picks: tuple[int, ...], name: str) -> float:
    return sum(row[pick][name] for row, pick in zip(costs, picks, strict=True))


def least_loss(losses, costs, limits) -> float | None:
    totals = [
        sum(row[pick] for row, pick in zip(losses, picks, strict=True))
        for picks in itertools.product(*(range(len(row)) for row in losses))
        if all(total(costs, picks, name) <= limit for name, limit in limits.items())
    ]
    return min(totals, default=None)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow)], ids=len)
def test_allocations_are_the_best_of_all_or_near_it(seeds: range):
    worse = 0
    for seed in seeds:
        losses, costs, limits = problem(seed)
        best = least_loss(losses, costs, limits)
        if best is None:
            with pytest.raises(Unreachable):
                allocate(losses, costs, limits)
            continue
        picks = allocate(losses, costs, limits)
        assert all(total(costs, picks, name) <= limit * (1 + 1e-8) for name, limit in limits.items())
        loss = sum(row[pick] for row, pick in zip(losses, picks, strict=True))
        assert loss >= best - 1e-12
        worse += loss > best + 1e-12
    assert worse <= len(seeds) / 20  # multipliers and moves of two units are a heuristic


def test_what_cannot_be_reached_names_the_least_that_can():
    losses, costs = [[0.0, 1.0]] * 2, [[{"bytes": 4.0}, {"bytes": 3.0}]] * 2
    with pytest.raises(Unreachable, match="bytes") as caught:
        allocate(losses, costs, {"bytes": 5.9})
    assert caught.value.least == pytest.approx({"bytes": 6.0})
    assert allocate(losses, costs, {"bytes": 6.0}) == (1, 1)
    assert sorted(allocate(losses, costs, {"bytes": 7.0})) == [0, 1]


def test_options_of_infinite_loss_are_never_picked():
    losses = [[float("inf"), 1.0, 2.0]] * 3
    costs = [[{"bytes": 0.0}, {"bytes": 2.0}, {"bytes": 1.0}]] * 3
    assert sorted(allocate(losses, costs, {"bytes": 4.0})) == [1, 2, 2]


def test_two_units_move_together_where_neither_gains_alone():
    loss = torch.tensor([[0.0, -5.0], [0.0, -1.0]], dtype=torch.float64)
    share = torch.tensor([[[0.2, 0.7], [0.2, 0.7]]], dtype=torch.float64)  # of the limit
    assert _by_moves(torch.tensor([0, 1]), loss, share).tolist() == [1, 0]

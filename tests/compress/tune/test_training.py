"""The training loop on problems whose answer is known."""

import math

import pytest
import torch
from torch import Tensor, nn

from semisparse.compress.tune import training
from semisparse.compress.tune.training import TuningResult, split_for_steps, train
from semisparse.errors import InputError

TOKENS = [700, 700, 700, 30, 20, 10, 2000, 700]


def fit(goals: Tensor, rate: float = 0.1, epochs: int = 40, tokens: list[int] = TOKENS) -> tuple[Tensor, TuningResult]:
    """Train one number to be near the goals of all batches."""
    weight = nn.Parameter(torch.zeros(()))
    groups = [{"params": [weight], "lr": rate}]
    result = train(
        groups, lambda i: (weight - goals[i]).square(), tokens, epochs=epochs, seed=0, progress=lambda *_: None
    )
    return weight.detach(), result


def test_it_finds_the_least_mean():
    weight, result = fit(torch.full((8,), 3.0))
    assert weight == pytest.approx(3, abs=0.1 * training.LAST_RATE * 10)
    assert (result.before, result.failure) == (9, None)
    assert result.after == pytest.approx((weight.item() - 3) ** 2, rel=1e-5)


def test_batches_count_by_their_tokens():
    """The goal of nearly all tokens is 1; that of most batches, which are short, is -1."""
    tokens = [2000, 2000, 2000] + [5] * 30
    weight, _ = fit(torch.tensor([1.0] * 3 + [-1.0] * 30), tokens=tokens)
    assert weight > 0.9


def test_the_best_state_is_restored():
    """At this learning rate every step overshoots: no state is better than the first."""
    weight, result = fit(torch.full((8,), 1e-3), rate=1.0, epochs=1)
    assert weight == 0
    assert result.before == result.after == pytest.approx(1e-6)
    assert result.steps > 0


def test_it_stops_early_without_improvement():
    _, result = fit(torch.zeros(8), epochs=200)
    steps = 200 * len(training._plan_steps(TOKENS, 1, training.random.Random(0))[1])
    assert result.steps <= math.ceil(steps / training.EVALUATIONS) * (training.PATIENCE + 1) < steps


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_it_in_the_best_state(bad: float):
    weight = nn.Parameter(torch.zeros(()))
    steps: list[int] = []

    def loss(index: int) -> Tensor:
        return (weight - 3).square() * (bad if torch.is_grad_enabled() and len(steps) > 30 else 1)

    result = train(
        [{"params": [weight], "lr": 0.1}],
        loss,
        TOKENS,
        epochs=40,
        seed=0,
        progress=lambda done, _: steps.append(done),
    )
    assert result.failure == f"the loss at step 31 is {bad}"
    assert "stopped: the loss at step 31" in result.outcome
    assert 0 < weight < 3.5
    assert result.after == pytest.approx((weight.item() - 3) ** 2, rel=1e-5)
    assert result.after < result.before


def test_a_start_that_is_not_finite_trains_nothing():
    weight, result = fit(torch.full((8,), math.nan))
    assert weight == 0
    assert (result.steps, result.failure) == (0, "the held-out loss is nan at the start")


def test_steps_are_full_and_hold_nothing_held_out():
    held_out, steps = training._plan_steps(TOKENS, 3, training.random.Random(1))
    assert sum(TOKENS[i] for i in held_out) >= sum(TOKENS) / 16
    assert sorted(i for step in steps for i in step) == sorted(3 * [i for i in range(8) if i not in held_out])
    assert all(sum(TOKENS[i] for i in step) <= training.STEP_TOKENS for step in steps)


@pytest.mark.parametrize(
    ("shapes", "split"),
    [
        ([(8, 256)], [(4, 256), (4, 256)]),
        ([(2, 4096)], [(1, 4096), (1, 4096)]),
        ([(5, 10)], [(3, 10), (2, 10)]),
        ([(1, 10), (1, 5)], [(1, 10), (1, 5)]),
    ],
)
def test_batches_are_split_for_steps(shapes: list[tuple[int, int]], split: list[tuple[int, int]]):
    assert [tuple(part.shape) for part in split_for_steps([torch.zeros(shape) for shape in shapes])] == split


def test_one_sequence_is_too_few():
    with pytest.raises(InputError, match="at least 2 calibration sequences, got 1"):
        split_for_steps([torch.zeros(1, 5000)])

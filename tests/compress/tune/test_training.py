"""The loop of every tuning stage on problems whose answer is known."""

import math

import pytest
import torch
from torch import Tensor, nn

from semisparse.compress.tune import training
from semisparse.compress.tune.training import Trained, cut_for_steps, train
from semisparse.errors import InputError

TOKENS = [700, 700, 700, 30, 20, 10, 2000, 700]


def fit(goals: Tensor, rate: float = 0.1, epochs: int = 40, tokens: list[int] = TOKENS) -> tuple[Tensor, Trained]:
    """Train one number towards a goal for each batch."""
    weight = nn.Parameter(torch.zeros(()))
    groups = [{"params": [weight], "lr": rate}]
    found = train(
        groups, lambda i: (weight - goals[i]).square(), tokens, epochs=epochs, seed=0, progress=lambda *_: None
    )
    return weight.detach(), found


def test_it_finds_the_least_mean():
    weight, found = fit(torch.full((8,), 3.0))
    assert weight == pytest.approx(3, abs=0.1 * training.LAST_RATE * 10)
    assert (found.before, found.failure) == (9, None)
    assert found.after == pytest.approx((weight.item() - 3) ** 2, rel=1e-5)


def test_batches_count_by_their_tokens():
    """Of what is trained on, all but a few tokens want 1 and the many short batches want -1."""
    tokens = [2000, 2000, 2000] + [5] * 30
    weight, _ = fit(torch.tensor([1.0] * 3 + [-1.0] * 30), tokens=tokens)
    assert weight > 0.9


def test_the_best_state_is_restored():
    """At this rate every step overshoots, so nothing is better than the start."""
    weight, found = fit(torch.full((8,), 1e-3), rate=1.0, epochs=1)
    assert weight == 0
    assert found.before == found.after == pytest.approx(1e-6)
    assert found.steps > 0


def test_it_gives_up_when_nothing_gets_better():
    _, found = fit(torch.zeros(8), epochs=200)
    steps = 200 * len(training._divide(TOKENS, 1, training.random.Random(0))[1])
    assert found.steps <= math.ceil(steps / training.LOOKS) * (training.PATIENCE + 1) < steps


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_it_in_the_best_state(bad: float):
    weight = nn.Parameter(torch.zeros(()))
    steps: list[int] = []

    def loss(index: int) -> Tensor:
        return (weight - 3).square() * (bad if torch.is_grad_enabled() and len(steps) > 30 else 1)

    found = train(
        [{"params": [weight], "lr": 0.1}],
        loss,
        TOKENS,
        epochs=40,
        seed=0,
        progress=lambda done, _: steps.append(done),
    )
    assert found.failure == f"the loss at step 31 is {bad}"
    assert "stopped: the loss at step 31" in found.outcome
    assert 0 < weight < 3.5
    assert found.after == pytest.approx((weight.item() - 3) ** 2, rel=1e-5)
    assert found.after < found.before


def test_a_start_that_is_not_finite_trains_nothing():
    weight, found = fit(torch.full((8,), math.nan))
    assert weight == 0
    assert (found.steps, found.failure) == (0, "the held-out loss is nan at the start")


def test_steps_hold_equally_many_tokens_and_nothing_held_out():
    held_out, steps = training._divide(TOKENS, 3, training.random.Random(1))
    assert sum(TOKENS[i] for i in held_out) >= sum(TOKENS) / 16
    assert sorted(i for step in steps for i in step) == sorted(3 * [i for i in range(8) if i not in held_out])
    assert all(sum(TOKENS[i] for i in step) <= training.STEP_TOKENS for step in steps)


@pytest.mark.parametrize(
    ("shapes", "cut"),
    [
        ([(8, 256)], [(4, 256), (4, 256)]),
        ([(2, 4096)], [(1, 4096), (1, 4096)]),
        ([(5, 10)], [(3, 10), (2, 10)]),
        ([(1, 10), (1, 5)], [(1, 10), (1, 5)]),
    ],
)
def test_batches_are_cut_to_steps(shapes: list[tuple[int, int]], cut: list[tuple[int, int]]):
    assert [tuple(part.shape) for part in cut_for_steps([torch.zeros(shape) for shape in shapes])] == cut


def test_one_sequence_is_too_few():
    with pytest.raises(InputError, match="at least 2 calibration sequences, got 1"):
        cut_for_steps([torch.zeros(1, 5000)])

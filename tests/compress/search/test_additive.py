"""Exact allocation of density by single effects, against all candidates."""

import itertools
import random

import pytest

from semisparse.compress.search import additive
from semisparse.compress.search.additive import allocate_exactly, interpolated, levels_to_measure
from semisparse.compress.search.space import LinearSpace, kept_weights


def spaces(seed: int) -> list[LinearSpace]:
    """Five linear layers of three sizes, each with levels from -2 to 2 where chance leaves them."""
    rng = random.Random(seed)
    made = []
    for index in range(5):
        levels = sorted({0, *rng.sample(range(-2, 3), rng.randint(1, 5))})
        kept = {level: 100 + level * rng.choice((6, 10, 15)) for level in levels}
        made.append(LinearSpace(str(index), 0, str(index), {}, kept, (1,)))
    return made


@pytest.mark.parametrize("seed", range(30))
def test_no_candidate_of_the_same_size_has_a_smaller_sum(seed: int):
    space, rng = spaces(seed), random.Random(seed)
    effects = [{level: rng.random() - 0.5 for level in linear.kept} for linear in space]
    start = (0,) * len(space)

    def total(candidate: tuple[int, ...]) -> float:
        return sum(effect[level] for effect, level in zip(effects, candidate, strict=True))

    found = allocate_exactly(space, effects, start)
    same_size = [
        candidate
        for candidate in itertools.product(*(linear.kept for linear in space))
        if kept_weights(space, candidate) == kept_weights(space, start)
    ]
    assert found in same_size
    assert total(found) == pytest.approx(min(map(total, same_size)))


def test_layers_that_cannot_change_stay():
    space = [LinearSpace("0", 0, "0", {}, {3: 7}, (1,))] * 2
    assert allocate_exactly(space, [{3: 0.0}] * 2, (3, 3)) == (3, 3)


def test_sizes_without_a_common_divisor_are_not_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(additive, "MAX_TABLE", 10)
    space = spaces(0)
    assert allocate_exactly(space, [dict.fromkeys(linear.kept, 0.0) for linear in space], (0,) * 5) is None


def test_effects_between_measured_levels():
    linear = LinearSpace("0", 0, "0", {}, dict.fromkeys((-8, -4, 0, 4, 8, 12), 1), (4,))
    assert levels_to_measure(linear, 0, 4) == [-8, -4, 4, 12]
    effects = interpolated(sorted(linear.kept), {-8: 9.0, -4: 3.0, 0: 0.0, 4: -1.0, 12: -2.0})
    assert effects == {-8: 9.0, -4: 3.0, 0: 0.0, 4: -1.0, 8: -1.5, 12: -2.0}
    assert levels_to_measure(LinearSpace("0", 0, "0", {}, {0: 1, 4: 2}, (4,)), 0, 4) == [4]

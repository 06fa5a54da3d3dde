"""Exchanges move weights between layers and never change how many there are."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from semisparse.compress.search.space import SHARES, Choice, exchange, kept_weights, list_choices
from semisparse.compress.walk import Block
from semisparse.patterns import NM, Pattern, parse_pattern

PATTERNS = ("32:64", "20:64", "4:8", "6:8", "16:32v4", "g16@50%", "g4@50%/row", "70%", "62.5%/row")


def choices_of(pattern: str, shapes: list[tuple[int, int]], accepts=lambda _: True) -> list[Choice]:
    module = nn.ModuleDict({f"layer{i}": nn.Linear(k, n, bias=False) for i, (n, k) in enumerate(shapes)})
    patterns = dict.fromkeys(module, parse_pattern(pattern))
    return list_choices([Block(f"blocks.{index}", module, patterns) for index in range(2)], 1, accepts)


@given(st.sampled_from(PATTERNS), st.lists(st.sampled_from([32, 44, 64, 128]), min_size=4, max_size=4), st.integers())
def test_an_exchange_moves_equal_numbers_of_weights(pattern: str, sizes: list[int], seed: int):
    shapes = [(sizes[0], sizes[1]), (sizes[2], sizes[3])]
    choices = choices_of(pattern, shapes)
    rng = random.Random(seed)
    start = levels = (0,) * len(choices)
    for stage in range(len(SHARES)):
        moved = exchange(choices, levels, stage, rng)
        if moved is None:
            continue
        assert moved != levels
        for choice, before, after in zip(choices, levels, moved, strict=True):
            assert (after - before) % choice.strides[stage] == 0
        levels = moved
    scores = {choice.name: torch.rand(shapes[i % 2]) for i, choice in enumerate(choices)}

    def count(candidate: tuple[int, ...]) -> int:
        masks = [c.patterns[level].mask(scores[c.name]) for c, level in zip(choices, candidate, strict=True)]
        return sum(int(mask.sum()) for mask in masks)

    if not (pattern.startswith("g") and any(k % choices[0].patterns[0].size for _, k in shapes)):
        assert count(levels) == count(start)  # what the masks keep, not what the search believes
    assert kept_weights(choices, levels) == kept_weights(choices, start)


def test_layers_of_different_shapes_exchange():
    """704 weights a step here and 256 there: 4 steps for 11, or any other way that comes out even."""
    choices = choices_of("32:64", [(352, 128), (128, 128)])
    sizes = {32: 0, 33: 0}
    for seed in range(300):
        moved = exchange(choices, (0, 0, 0, 0), 2, random.Random(seed))
        between = moved[0] + moved[2]
        sizes[32 if between == 0 else 33] += 1
        assert 704 * between + 256 * (moved[1] + moved[3]) == 0
    assert sizes[32] > 0


@pytest.mark.parametrize(
    ("pattern", "strides", "levels"),
    [
        ("32:64", (4, 2, 1), range(-7, 8)),
        ("4:64", (4, 2, 1), range(-3, 8)),
        ("16:32v4", (2, 1, 1), range(-4, 5)),
        ("4:8", (1, 1, 1), range(-3, 4)),
        ("6:8", (1, 1, 1), range(-3, 3)),
        ("50%", (4, 2, 1), range(-7, 8)),
        ("g16@50%/row", (1, 1, 1), range(-3, 4)),
    ],
)
def test_the_bank_reaches_one_step_of_each_stage(pattern: str, strides: tuple[int, ...], levels: range):
    choice = choices_of(pattern, [(64, 128)])[0]
    assert choice.strides == strides
    assert sorted(choice.patterns) == list(levels)
    uniform = choice.patterns[0]
    assert {level: str(found) for level, found in choice.patterns.items() if level == 0} == {0: pattern}
    share = 64 * 128 // uniform.levels((64, 128))
    assert {level: kept - choice.kept[0] for level, kept in choice.kept.items()} == {n: n * share for n in levels}


def test_only_what_can_be_stored_is_chosen():
    def even(pattern: Pattern) -> bool:
        return isinstance(pattern, NM) and pattern.keep < 34

    choice = choices_of("32:64", [(64, 128)], even)[0]
    assert sorted(choice.patterns) == list(range(-7, 2))


def test_nothing_moves_where_every_layer_is_full():
    for shape in ((64, 128), (64, 24)):  # of 24 columns, 63:64 keeps all, too
        choices = choices_of("64:64", [shape])
        assert exchange(choices, (0, 0), 2, random.Random(0)) is None

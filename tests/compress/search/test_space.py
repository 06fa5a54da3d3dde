"""Level switches move weights between linear layers and never change how many there are."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from semisparse.compress.layers import DecoderLayer
from semisparse.compress.search.space import STAGE_STRIDES, LinearSpace, kept_weights, search_space, switch_levels
from semisparse.patterns import NM, Pattern, parse_pattern

PATTERNS = ("32:64", "20:64", "4:8", "6:8", "16:32v4", "g16@50%", "g4@50%/row", "70%", "62.5%/row")


def space_of(pattern: str, shapes: list[tuple[int, int]], accepts=lambda _: True) -> list[LinearSpace]:
    """The search space of two decoder layers with linear layers of these shapes [N, K]."""
    module = nn.ModuleDict({f"linear{i}": nn.Linear(k, n, bias=False) for i, (n, k) in enumerate(shapes)})
    patterns = dict.fromkeys(module, parse_pattern(pattern))
    return search_space([DecoderLayer(f"layers.{index}", module, patterns) for index in range(2)], 1, accepts)


@given(st.sampled_from(PATTERNS), st.lists(st.sampled_from([32, 44, 64, 128]), min_size=4, max_size=4), st.integers())
def test_a_switch_moves_equal_numbers_of_weights(pattern: str, sizes: list[int], seed: int):
    shapes = [(sizes[0], sizes[1]), (sizes[2], sizes[3])]
    space = space_of(pattern, shapes)
    rng = random.Random(seed)
    uniform = candidate = (0,) * len(space)
    for stage in range(len(STAGE_STRIDES)):
        switched = switch_levels(space, candidate, stage, rng)
        if switched is None:
            continue
        assert switched != candidate
        for layer, before, after in zip(space, candidate, switched, strict=True):
            assert (after - before) % layer.strides[stage] == 0
        candidate = switched
    generator = torch.Generator().manual_seed(0)
    scores = [torch.rand(shapes[i % 2], generator=generator) for i in range(len(space))]

    def count_in_masks(levels: tuple[int, ...]) -> int:
        return sum(int(s.patterns[level].mask(x).sum()) for s, level, x in zip(space, levels, scores, strict=True))

    short_groups = pattern.startswith("g") and any(k % space[0].patterns[0].step for _, k in shapes)
    assert short_groups or count_in_masks(candidate) == count_in_masks(uniform)
    assert kept_weights(space, candidate) == kept_weights(space, uniform)


def test_layers_of_different_shapes_switch_levels():
    """A step is 384 weights in one shape and 256 in the other, so that 2 steps of one balance 3 of the other."""
    space = space_of("32:64", [(192, 128), (128, 128)])
    between_shapes = 0
    for seed in range(100):
        candidate = switch_levels(space, (0, 0, 0, 0), 2, random.Random(seed))
        moved = candidate[0] + candidate[2]
        between_shapes += moved != 0
        assert 384 * moved + 256 * (candidate[1] + candidate[3]) == 0
    assert 0 < between_shapes < 100


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
def test_levels_reach_one_stride_of_each_stage(pattern: str, strides: tuple[int, ...], levels: range):
    layer = space_of(pattern, [(64, 128)])[0]
    assert layer.strides == strides
    assert sorted(layer.patterns) == list(levels)
    assert str(layer.patterns[0]) == pattern
    step = 64 * 128 // layer.patterns[0].levels((64, 128))
    assert {level: kept - layer.kept[0] for level, kept in layer.kept.items()} == {n: n * step for n in levels}


def test_only_patterns_that_can_be_stored_are_offered():
    def accepts(pattern: Pattern) -> bool:
        return isinstance(pattern, NM) and pattern.keep < 34

    assert sorted(space_of("32:64", [(64, 128)], accepts)[0].patterns) == list(range(-7, 2))


def test_nothing_moves_where_every_layer_is_full():
    for shape in ((64, 128), (64, 24)):  # of 24 columns, 63:64 keeps all, too
        assert switch_levels(space_of("64:64", [shape]), (0, 0), 2, random.Random(0)) is None

"""A weight pruned by rows, in pieces of several processes or of one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semisparse.compress import Recipe
from semisparse.compress.prune import PrunedLayer, Rows, Statistics, piece_lengths, prune_layer
from semisparse.patterns import parse_pattern
from tests.compress.prune.test_layer import inputs, random_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPE = Recipe(prune="sparsegpt", target="residual")
PATTERN, ROWS, COLUMNS = (parse_pattern("32:64"), 2000, 1024) if DEVICE == "cuda" else (parse_pattern("8:16"), 100, 48)


@pytest.mark.parametrize(
    ("rows", "lengths"), [(1, [1]), (32, [32]), (33, [32, 1]), (130, [64, 64, 2]), (4096, [1024] * 4)]
)
def test_pieces(rows: int, lengths: list[int]):
    assert piece_lengths(rows) == lengths


def problem() -> tuple[Tensor, Statistics]:
    weight, tokens = random_weight(ROWS, COLUMNS).to(DEVICE), 8 * COLUMNS
    x = inputs(tokens, COLUMNS).to(DEVICE)
    dense = x + 0.1 * inputs(tokens, COLUMNS, seed=1).to(DEVICE)
    return weight, Statistics(x.T @ x / len(x), weight @ dense.T @ x / len(x))


def prune(lengths: list[int], own: slice, all_of: Callable[[list[Tensor]], list[Tensor]]) -> PrunedLayer:
    weight, statistics = problem()
    assert statistics.cross is not None
    rows = slice(sum(lengths[: own.start]), sum(lengths[: own.stop]))
    some = replace(statistics, cross=statistics.cross[rows])
    return prune_layer(weight[rows], PATTERN, some, RECIPE, Rows(lengths[own], all_of))


def test_pieces_are_the_whole_weight_up_to_rounding():
    weight, statistics = problem()
    whole = prune_layer(weight, PATTERN, statistics, RECIPE)
    lengths = piece_lengths(len(weight))
    assert len(lengths) == 4
    found = prune(lengths, slice(0, 4), lambda values: values)
    PATTERN.check(found.weight)
    assert found.error == pytest.approx(whole.error, rel=1e-3)
    if DEVICE == "cpu":  # on a GPU another order of sums gives some other masks
        assert torch.equal(found.weight != 0, whole.weight != 0)
        torch.testing.assert_close(found.weight, whole.weight, rtol=1e-3, atol=1e-4)
    assert found.outcome == whole.outcome


def test_each_process_gets_the_rows_that_one_alone_gets():
    """The sums over all rows are those of the process alone, as if the others had sent theirs."""
    lengths = piece_lengths(ROWS)
    totals: list[list[Tensor]] = []

    def keep(values: list[Tensor]) -> list[Tensor]:
        totals.append(values)
        return values

    alone = prune(lengths, slice(0, 4), keep)
    start = 0
    for own in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 4)):
        sent = iter(totals)

        def exchange(values: list[Tensor], own: slice = own, sent=sent) -> list[Tensor]:
            everything = next(sent)
            assert len(values) == len(everything[own])
            assert all(torch.equal(value, expected) for value, expected in zip(values, everything[own], strict=True))
            return everything

        found = prune(lengths, own, exchange)
        assert torch.equal(found.weight, alone.weight[start : start + len(found.weight)])
        assert found.error == alone.error
        start += len(found.weight)
    assert start == ROWS

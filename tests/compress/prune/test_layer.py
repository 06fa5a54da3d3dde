"""One linear layer pruned by a recipe: the settings do what they say, and singular Hessians are handled."""

import pytest
import torch
from torch import Tensor

from semisparse.compress import Recipe
from semisparse.compress.prune import RunningSums, Statistics, prune_kinds, prune_layer
from semisparse.errors import InputError
from semisparse.patterns import parse_pattern

PLAIN = Recipe(refine="none", order="columns", target="local")
"""SparseGPT with repeated masks, and no other gain."""


def inputs(tokens: int = 400, columns: int = 48, seed: int = 0) -> Tensor:
    """Correlated inputs of unequal strength, log-normal as the features of language models are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = 2 * torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    strength = torch.randn(columns, generator=generator).exp()
    return torch.randn(tokens, columns, generator=generator) @ mixing * strength


def random_weight(rows: int = 24, columns: int = 48) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def statistics_of(x: Tensor) -> Statistics:
    return Statistics(x.T @ x / len(x))


def output_error(pruned: Tensor, weight: Tensor, x: Tensor) -> float:
    return float(((pruned - weight) @ x.T).norm() / (weight @ x.T).norm())


def test_magnitude_keeps_the_largest():
    weight = torch.tensor([[1.0, -5, 3, -2, -7, 0.5, 0.1, 8]])
    pruned = prune_layer(weight, parse_pattern("2:4"), statistics_of(inputs(columns=8)), Recipe(prune="magnitude"))
    assert pruned.weight.tolist() == [[0, -5, 3, 0, -7, 0, 0, 8]]
    assert pruned.outcome == "magnitude"


def test_wanda_weighs_by_the_norm_of_the_input():
    hessian = torch.tensor([100, 1, 1, 1e-4]).diag()
    pruned = prune_layer(
        torch.tensor([[1.0, -5, 3, -90]]), parse_pattern("2:4"), Statistics(hessian), Recipe(prune="wanda")
    )
    assert pruned.weight.tolist() == [[1, -5, 0, 0]]


def test_no_negative_zero_is_left():
    for prune in ("magnitude", "wanda", "sparsegpt"):
        pruned = prune_layer(random_weight(), parse_pattern("2:4"), statistics_of(inputs()), Recipe(prune=prune)).weight
        assert not pruned[pruned == 0].signbit().any(), prune


@pytest.mark.parametrize("pattern", ["2:4", "6:8", "16:32", "4:16v8", "g8@50%", "50%"])
def test_each_method_loses_less_than_the_one_before(pattern: str):
    weight, x = random_weight(), inputs()
    recipes = [
        Recipe(prune="magnitude"),
        Recipe(prune="wanda"),
        PLAIN,
        Recipe(order="columns", target="local"),
    ]
    errors = []
    for recipe in recipes:
        pruned = prune_layer(weight, parse_pattern(pattern), statistics_of(x), recipe)
        assert pruned.error == pytest.approx(output_error(pruned.weight, weight, x), rel=1e-3)
        parse_pattern(pattern).check(pruned.weight)
        errors.append(pruned.error)
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)


@pytest.mark.parametrize(("pattern", "gain"), [("16:32", 0.1), ("6:8", 0.1), ("50%", 0.05), ("2:4", -0.05)])
def test_repeated_masks_against_sparsegpt_as_published(pattern: str, gain: float):
    """At 2:4 the masks of both are equal."""
    published, repeated = (
        prune_layer(random_weight(), parse_pattern(pattern), statistics_of(inputs()), recipe).error
        for recipe in (Recipe(prune="sparsegpt-published"), PLAIN)
    )
    assert repeated < (1 - gain) * published


def test_the_published_algorithm_has_no_settings():
    """It has its own masks, order and target: settings of the default algorithm must not change it."""
    weight, statistics = random_weight(), statistics_of(inputs())
    pruned = [
        prune_layer(weight, parse_pattern("2:4"), statistics, Recipe(prune="sparsegpt-published", **settings)).weight
        for settings in ({}, {"refine": "none", "order": "columns", "target": "local", "saliency": "eq4"})
    ]
    assert torch.equal(*pruned)


def test_equation_4_is_another_saliency():
    """It divides by the squared entry of the whole inverse: weights of redundant inputs get even lower scores."""
    weight, statistics = random_weight(), statistics_of(inputs())
    masks = [
        prune_layer(weight, parse_pattern("g8@50%"), statistics, Recipe(saliency=saliency)).weight != 0
        for saliency in ("loss", "eq4")
    ]
    assert not torch.equal(*masks)


def test_the_target_is_fitted():
    """With every weight kept, the result is the least-squares fit to the target, damped towards the dense weight."""
    weight, x = random_weight(), inputs()
    target = x @ weight.T + inputs(columns=24, seed=2)[: len(x)] + 2 * x[:, :24]
    statistics = Statistics(x.T @ x / len(x), target.T @ x / len(x))
    fitted = prune_layer(weight, parse_pattern("48:48"), statistics, Recipe()).weight
    scale = x.double().square().mean(0).sqrt()
    ridge = (0.01 * len(x)) ** 0.5 * scale.diag()
    rows, right = torch.cat((x, ridge)), torch.cat((target, ridge @ weight.double().T))
    expected = torch.linalg.lstsq(rows, right).solution.T
    torch.testing.assert_close(fitted.double(), expected, rtol=1e-3, atol=1e-3)
    assert (fitted - weight).norm() > 0.2 * weight.norm()


def test_dead_inputs_are_pruned_first():
    x = inputs()
    x[:, 5:9] = 0
    for recipe in (PLAIN, Recipe()):
        pruned = prune_layer(random_weight(), parse_pattern("40:48"), statistics_of(x), recipe)
        assert not pruned.weight[:, 5:9].any()
        assert pruned.outcome == "sparsegpt"
        assert pruned.error < 0.1


def test_all_inputs_dead():
    pruned = prune_layer(random_weight(), parse_pattern("2:4"), Statistics(torch.zeros(48, 48)), Recipe())
    assert not pruned.weight.any()
    assert pruned.error == 0


def test_fewer_tokens_than_columns():
    x = inputs(tokens=5)
    pruned = prune_layer(random_weight(), parse_pattern("2:4"), statistics_of(x), Recipe())
    assert pruned.outcome == "sparsegpt"
    assert pruned.error < 0.05, "24 weights can fit five tokens"


def test_outlier_features_do_not_change_the_error():
    """Damping by the mean of the diagonal would be larger than the diagonal entries of 46 of the 48 inputs here."""
    x, plain = inputs(), inputs()
    x[:, :2] *= 1000
    outlier = prune_layer(
        random_weight() / torch.where(torch.arange(48) < 2, 1000, 1), parse_pattern("2:4"), statistics_of(x), PLAIN
    )
    usual = prune_layer(random_weight(), parse_pattern("2:4"), statistics_of(plain), PLAIN)
    assert outlier.error == pytest.approx(usual.error, rel=1e-3), (
        "the result does not depend on the scale of the inputs"
    )


def test_an_indefinite_hessian_falls_back_to_wanda_and_is_reported():
    hessian = torch.full((48, 48), 3.0) - 2 * torch.eye(48)
    for recipe in (PLAIN, Recipe()):
        pruned = prune_layer(random_weight(), parse_pattern("2:4"), Statistics(hessian), recipe)
        assert pruned.outcome == "wanda (hessian singular)"
        expected = prune_layer(random_weight(), parse_pattern("2:4"), Statistics(hessian), Recipe(prune="wanda"))
        assert torch.equal(pruned.weight, expected.weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float):
    weight, statistics = random_weight(), statistics_of(inputs())
    weight[3, 4] = bad
    with pytest.raises(InputError, match="weight holds NaN or infinity"):
        prune_layer(weight, parse_pattern("2:4"), statistics, Recipe())
    for spoiled in (
        Statistics(torch.full((48, 48), bad)),
        Statistics(statistics.hessian, torch.full((24, 48), bad)),
    ):
        with pytest.raises(InputError, match="activations hold NaN or infinity"):
            prune_layer(random_weight(), parse_pattern("2:4"), spoiled, Recipe())


def test_several_ways_at_once_give_what_each_gives_alone():
    weight, x = random_weight(), inputs()
    statistics = Statistics(x.T @ x / len(x), weight @ (x.T @ x / len(x)) * 1.01)
    recipes = [Recipe(quant="w4"), Recipe(quant="w3"), Recipe()]
    ways = [
        ("16:48", recipes[2]),
        ("2:4", recipes[2]),
        ("g8@0%", recipes[0]),
        ("g8@0%", recipes[1]),
        ("4:16", recipes[0]),
    ]
    listed = [(parse_pattern(pattern), recipe) for pattern, recipe in ways]
    for found, way in zip(prune_kinds(weight, listed, statistics), listed, strict=True):
        alone = prune_layer(weight, way[0], statistics, way[1])
        assert torch.equal(found.weight, alone.weight)
        assert (found.outcome, found.error) == (alone.outcome, alone.error)


def test_sums_over_batches():
    x, dense, gap, weight = inputs(), inputs(seed=3), inputs(columns=24, seed=4), random_weight()
    sums = RunningSums()
    for part in torch.arange(400).split(150):
        sums.add(x[part].bfloat16(), dense[part].bfloat16(), {"writer": gap[part].bfloat16()})
    x, dense, gap = (t.bfloat16().double() for t in (x, dense, gap))
    for name, target in (("reader", dense @ weight.double().T), ("writer", dense @ weight.double().T + gap)):
        means = sums.statistics(name, weight)
        torch.testing.assert_close(means.hessian.double(), x.T @ x / 400, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(means.cross.double(), target.T @ x / 400, rtol=1e-4, atol=1e-4)


def test_sums_without_a_dense_model():
    sums = RunningSums()
    sums.add(inputs(), None, {})
    assert sums.statistics("any", random_weight()).cross is None


def test_sums_over_nothing_are_refused():
    with pytest.raises(InputError, match="no calibration token"):
        RunningSums().statistics("expert", random_weight())

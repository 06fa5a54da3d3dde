"""Prune one linear layer's weight as a recipe says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from semisparse.compress.prune.magnitude import magnitude
from semisparse.compress.prune.masks import EQUATION_4, PUBLISHED, REPEATED, MaskRule
from semisparse.compress.prune.problem import Problem, normalise
from semisparse.compress.prune.quantise import ColumnQuantiser, round_by_descent, scales_for
from semisparse.compress.prune.refine import conjugate_gradient
from semisparse.compress.prune.rows import WHOLE, Rows
from semisparse.compress.prune.sparsegpt import has_pruning_kernel, prune_columns, quantise_columns
from semisparse.compress.prune.statistics import Statistics
from semisparse.compress.prune.swaps import swap_weights
from semisparse.compress.prune.wanda import wanda
from semisparse.compress.recipe import Recipe
from semisparse.compress.three_pass import multiplier
from semisparse.errors import InputError
from semisparse.patterns import NM, Group, Pattern
from semisparse.quant.group import GroupScales


@dataclass(frozen=True)
class PrunedLayer:
    """A pruned weight.

    Args:
        weight: [N, K] float32, exactly zero where pruned.
        outcome: what was done, such as ``sparsegpt`` or ``sparsegpt damping 0.1``.
        error: relative error of the output over the calibration tokens, ``||(w' - w) x|| / ||w x||``.
        scales: of the quantised groups; None if the weight is not quantised.
    """

    weight: Tensor
    outcome: str
    error: float
    scales: GroupScales | None = None


def prune_layer(
    weight: Tensor, pattern: Pattern, statistics: Statistics, recipe: Recipe, rows: Rows = WHOLE
) -> PrunedLayer:
    """Prune a linear layer's weight to a pattern.

    Args:
        weight: [N, K], any float dtype; the scales get this dtype.
        pattern: that the result obeys.
        statistics: of the linear layer's calibration inputs.
        recipe: `prune`, which is not ``none``, and the settings for it.
        rows: of which the weight consists, like the statistics' ``cross`` and the result; the error is that of all
            rows. Where it is not the whole weight, `can_share_rows` must hold.

    Raises:
        InputError: the weight or the statistics hold NaN or infinity.
    """
    return next(_prune_ways(weight, [(pattern, recipe)], statistics, rows))


def can_share_rows(weight: Tensor, pattern: Pattern, recipe: Recipe) -> bool:
    """Return whether several processes may prune rows of a weight, and one process all of them in as many pieces.

    They may where a kernel prunes the columns of all rows of a process at once: pieces one after another would take a
    single process longer.
    """
    by_hessian = recipe.prune.startswith("sparsegpt") and recipe.refine != "swaps" and not recipe.code_bits
    return by_hessian and not _rule(recipe).literal and has_pruning_kernel(pattern, weight)


def prune_levels(
    weight: Tensor, patterns: Sequence[Pattern], statistics: Statistics, recipe: Recipe
) -> Iterator[PrunedLayer]:
    """Prune a linear layer's weight to each of several patterns of one class; the Hessian is factorised once.

    Args:
        weight: as in `prune_layer`.
        patterns: the first determines the order in which columns are pruned for all of them; only the first result is
            the same as that of `prune_layer`.
        statistics: as in `prune_layer`.
        recipe: as in `prune_layer`.

    Raises:
        InputError: as in `prune_layer`.
    """
    yield from _prune_ways(weight, [(pattern, recipe) for pattern in patterns], statistics)


def prune_kinds(
    weight: Tensor, ways: Sequence[tuple[Pattern, Recipe]], statistics: Statistics
) -> Iterator[PrunedLayer]:
    """Prune and quantise a linear layer's weight in several ways, each as `prune_layer` alone would.

    Ways of one pattern, which follow each other, are pruned once. What does not depend on the pattern is computed once.

    Args:
        weight: as in `prune_layer`.
        ways: patterns and recipes; the recipes differ in `quant` only.
        statistics: as in `prune_layer`.

    Raises:
        InputError: as in `prune_layer`.
    """
    yield from _prune_ways(weight, ways, statistics, own_orders=True)


def _prune_ways(
    weight: Tensor,
    ways: Sequence[tuple[Pattern, Recipe]],
    statistics: Statistics,
    rows: Rows = WHOLE,
    own_orders: bool = False,
) -> Iterator[PrunedLayer]:
    """Prune and quantise a weight in several ways, each a pattern and a recipe; the recipes differ in `quant` only.

    With ``own_orders`` each pattern determines the order of its columns, else the first one that of all. The pruners
    call no linear layer, so torch calls are not intercepted here (`ThreePassLinear`): on a CPU the interception takes a
    third of the time.
    """
    first, recipe = ways[0]
    with torch._C.DisableTorchFunction():
        dtype, weight = weight.dtype, weight.float()
        require_finite(weight)
        if not all(mean.isfinite().all() for mean in (statistics.hessian, statistics.cross) if mean is not None):
            raise InputError("its calibration activations hold NaN or infinity, or are too large for float32")
        by_hessian = recipe.prune.startswith("sparsegpt")
        normalised = normalise(weight, statistics, recipe, rows) if by_hessian else None
        problem = None if normalised is None else normalised.ordered(first, recipe, rows, keep=own_orders)
        power = _power_of_outputs(weight, statistics.hessian, rows)
    for pattern, alike in groupby(ways, key=lambda way: way[0]):
        recipes = [recipe for _, recipe in alike]
        with torch._C.DisableTorchFunction():
            if normalised is not None and own_orders and pattern != first:
                problem = normalised.ordered(pattern, recipe, rows, keep=True)
            results: list[tuple[Tensor, GroupScales | None]]
            if problem is not None:
                results, outcome = _sparsegpt(problem, pattern, recipes, dtype, rows), problem.factor.outcome
            elif recipe.prune == "magnitude":
                results, outcome = [(magnitude(weight, pattern), None)] * len(recipes), "magnitude"
            else:
                results = [(wanda(weight, pattern, statistics.hessian), None)] * len(recipes)
                outcome = "wanda" if recipe.prune == "wanda" else "wanda (hessian singular)"
            outcome += f", {statistics.note}" if statistics.note else ""
            layers = []
            for each, (pruned, scales) in zip(recipes, results, strict=True):
                if each.code_bits:
                    scales = scales or scales_for(pruned, pattern, each.code_bits, dtype)
                    pruned = scales.rounded(pruned).float()
                error = _relative_error(pruned, weight, statistics.hessian, power, rows)
                layers.append(PrunedLayer(pruned, outcome, error, scales))
        yield from layers


def require_finite(weight: Tensor) -> None:
    """Raise unless every weight is finite.

    Raises:
        InputError: a weight is NaN or infinite.
    """
    if not weight.isfinite().all():
        raise InputError("the weight holds NaN or infinity; the model is damaged")


def _masked(problem: Problem, pattern: Pattern, recipe: Recipe, rows: Rows) -> tuple[Tensor, Tensor]:
    """Prune without quantising; return the weight and the mask, columns in pruning order."""
    goal, upper = problem.goal, problem.factor.upper
    if isinstance(pattern, Group) and pattern.percent == 0:
        return goal, torch.ones_like(goal, dtype=torch.bool)
    if rows.lengths == []:
        return goal, goal.bool()
    pruned, kept = prune_columns(goal, upper, pattern, None, _rule(recipe), rows.lengths)
    if _refines(recipe):
        pruned = rows.joined(lambda *of: conjugate_gradient(of[0], of[1], problem.hessian, of[2]), pruned, kept, goal)
    if recipe.refine == "swaps":
        assert isinstance(pattern, NM), f"refine=swaps with {pattern}: the recipe was not checked"
        pruned, kept = swap_weights(pruned, kept, problem.hessian, goal, problem.order, pattern.window)
        pruned = conjugate_gradient(pruned, kept, problem.hessian, goal)
    return pruned, kept


def _rule(recipe: Recipe) -> MaskRule:
    if recipe.prune == "sparsegpt-published":
        return PUBLISHED
    return {"loss": REPEATED, "eq4": EQUATION_4}[recipe.saliency]


def _sparsegpt(
    problem: Problem, pattern: Pattern, recipes: Sequence[Recipe], dtype: torch.dtype, rows: Rows = WHOLE
) -> list[tuple[Tensor, GroupScales | None]]:
    """Prune, and quantise as each recipe says.

    Groups of a `Group` pattern are quantised in a second loop over the columns; without conjugate gradients, in the
    loop that prunes. Weights of other patterns are quantised by coordinate descent.

    Returns:
        For each recipe the weight [N, K] float32, and the scales of its groups in ``dtype``; None if it is not
        quantised.
    """
    first, restore_order = recipes[0], problem.order.argsort()
    bits = [recipe.code_bits for recipe in recipes if recipe.code_bits]
    together = bits and isinstance(pattern, Group) and pattern.percent and not _refines(first)
    if together and len(recipes) > 1:
        return [result for recipe in recipes for result in _sparsegpt(problem, pattern, [recipe], dtype)]
    pruned, kept = (problem.goal, problem.goal != 0) if together else _masked(problem, pattern, first, rows)
    coded: Iterator[tuple[Tensor, GroupScales | None]] = iter(())
    if bits and isinstance(pattern, Group):
        coded = iter(_in_groups(problem, pattern, first, pruned, kept, bits, dtype))
    elif bits:
        coded = iter(_by_descent(problem, pattern, first, pruned, kept, bits, dtype))
    plain = pruned[:, restore_order] / problem.scale
    return [next(coded) if recipe.code_bits else (plain, None) for recipe in recipes]


def _refines(recipe: Recipe) -> bool:
    """Return whether kept weights are optimised once the mask is final."""
    return recipe.refine != "none" and recipe.prune != "sparsegpt-published"


def _in_groups(
    problem: Problem,
    pattern: Group,
    recipe: Recipe,
    pruned: Tensor,
    kept: Tensor,
    bits: Sequence[int],
    dtype: torch.dtype,
) -> list[tuple[Tensor, GroupScales | None]]:
    """Quantise whole groups to each number of bits; return the weights, columns in their own order, and scales."""
    upper, restore_order = problem.factor.upper, problem.order.argsort()
    units = problem.scale[problem.order]
    # What an error in a column costs once the columns after it have compensated it.
    cost = (units / upper.diagonal()).square() if recipe.scales == "fit" else None
    if pattern.percent and not _refines(recipe):
        quantiser = ColumnQuantiser(bits, pattern.step, units, dtype, cost)
        weights = [prune_columns(problem.goal, upper, pattern, quantiser, _rule(recipe))[0]]
        scales = quantiser.scales
    else:
        weights, scales = quantise_columns(pruned, kept, upper, bits, pattern.step, units, dtype, cost)
    # Groups stay whole in the pruning order, so the order of their first columns is the order of the groups.
    groups = problem.order[:: pattern.step].argsort()
    own_order = [weight[:, restore_order] / problem.scale for weight in weights]
    return [(weight, each.select_groups(groups)) for weight, each in zip(own_order, scales, strict=True)]


def _by_descent(
    problem: Problem,
    pattern: Pattern,
    recipe: Recipe,
    pruned: Tensor,
    kept: Tensor,
    bits: Sequence[int],
    dtype: torch.dtype,
) -> list[tuple[Tensor, GroupScales | None]]:
    """Quantise single kept weights to each number of bits; return as `_in_groups` does."""
    restore_order = problem.order.argsort()
    power = problem.scale.square() if recipe.scales == "fit" else None
    plain = pruned[:, restore_order] / problem.scale
    scales = [scales_for(plain, pattern, each, dtype, power) for each in bits]
    units = problem.scale[problem.order]
    weights = round_by_descent(pruned, kept, problem.hessian, problem.goal, scales, problem.order, units)
    return [(w[:, restore_order] / problem.scale, each) for w, each in zip(weights, scales, strict=True)]


def _power_of_outputs(weight: Tensor, hessian: Tensor, rows: Rows) -> Tensor:
    """Return the mean over the calibration tokens of ``||w x||^2``."""
    through = multiplier(hessian)
    return rows.total(lambda weight: (through(weight) * weight).sum(), weight)


def _relative_error(pruned: Tensor, weight: Tensor, hessian: Tensor, power: Tensor, rows: Rows) -> float:
    """Return the relative error of the output; ``power`` is that of `_power_of_outputs`."""
    lost = _power_of_outputs(pruned - weight, hessian, rows)
    return float((lost.clamp_min(0) / power).sqrt().where(power > 0, 0.0))

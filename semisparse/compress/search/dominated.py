"""Choices that a search need not measure, because another one loses less and costs no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semisparse.compress.choice import Choice

Costs = Sequence[Sequence[Mapping[str, float]]]
"""Costs by name, [units][options]."""


def dominated(
    measured: Mapping[Choice, Sequence[float]], options: Mapping[Choice, Sequence[int]], costs: Costs, factor: float
) -> set[Choice]:
    """Return the choices that another one beats in every number by a factor, at no higher cost in any unit.

    Limits that could be kept can still be kept without them.

    Args:
        measured: what each choice loses: as many numbers for each.
        options: the index of each choice's option in every unit.
        costs: of the options.
        factor: above 1.
    """
    return {
        choice
        for choice, losses in measured.items()
        if any(
            all(factor * low < high for low, high in zip(others, losses, strict=True))
            and costs_no_more(options[other], options[choice], costs)
            for other, others in measured.items()
        )
    }


def costs_no_more(cheap: Sequence[int], dear: Sequence[int], costs: Costs) -> bool:
    """Return whether no cost of any unit is higher with the options ``cheap`` than with ``dear``."""
    return all(
        unit[one][name] <= cost
        for unit, one, other in zip(costs, cheap, dear, strict=True)
        for name, cost in unit[other].items()
    )

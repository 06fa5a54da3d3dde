"""What the options of each unit cost, and allocations of options under limits on these costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semisparse.compress.choice import Choice
from semisparse.compress.search.allocate import Unreachable, allocate
from semisparse.compress.search.units import Unit

Assignment = tuple[int, ...]
"""The index of an option for each unit."""


class UnitCosts:
    """The costs of all options of the units.

    Args:
        units: in the model's order.

    Attributes:
        options: the costs by name, [units][options].
        of_dense: the sum of each cost over the units, all dense.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.options = [[option.costs for option in unit.options] for unit in units]
        self.of_dense = self.totals(self.dense)

    def totals(self, assignment: Assignment) -> dict[str, float]:
        """Return the sum of each cost over the units."""
        picked = [costs[pick] for costs, pick in zip(self.options, assignment, strict=True)]
        return {name: sum(cost[name] for cost in picked) for name in picked[0]}

    def relative(self, assignment: Assignment) -> dict[str, float]:
        """Return the sum of each cost over the units, relative to dense."""
        return {name: total / self.of_dense[name] for name, total in self.totals(assignment).items()}

    def allocate(self, losses: Sequence[Sequence[float]], limits: Mapping[str, float]) -> Assignment:
        """Return the assignment with the least sum of losses ([units][options]) that keeps limits relative to dense.

        Raises:
            Unreachable: there is none; its `least` is relative to dense, too.
        """
        dense = self.of_dense
        try:
            return allocate(losses, self.options, {name: share * dense[name] for name, share in limits.items()})
        except Unreachable as error:
            least = {name: total / dense[name] for name, total in error.least.items()}
            raise Unreachable(str(error), least) from error

    def proxy_losses(self) -> list[list[float]]:
        """Return estimated losses, [units][options]: each bit per weight divides the squared rounding error by 4."""
        return [
            [unit.weights * 4.0 ** -(option.costs["bits"] / unit.weights) for option in unit.options]
            for unit in self._units
        ]

    @property
    def dense(self) -> Assignment:
        """The assignment that leaves every layer as it is."""
        return (0,) * len(self._units)

    def uniform(self, choice: Choice) -> Assignment | None:
        """Return the assignment of one choice to all units; None if a unit does not have it."""
        picks = []
        for unit in self._units:
            matching = [index for index, option in enumerate(unit.options) if option.choice == choice]
            if not matching:
                return None
            picks.append(matching[0])
        return tuple(picks)

    def uniforms(self) -> dict[Choice, Assignment]:
        """Return the assignments of one choice to all units."""
        choices = dict.fromkeys(option.choice for unit in self._units for option in unit.options)
        return {choice: picks for choice in choices if (picks := self.uniform(choice)) is not None}

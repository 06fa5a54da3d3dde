"""What a compression says of its work: how far it is, and what was done to one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from semisparse.quant.group import GroupScales


class Progress(Protocol):
    """Told how far a compression is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take what runs now, the steps done (layers, for the pruning itself) and the steps to do in all."""


@dataclass(frozen=True)
class LayerReport:
    """The result for one layer.

    Args:
        name: the layer's module name in the model.
        pattern: written form.
        density: share of weights that are not zero, 0 to 1.
        error: relative error of the layer's output on the calibration tokens, ``||(w' - w) x|| / ||w x||``;
            None where there were none.
        outcome: what was done, such as ``sparsegpt`` or ``wanda (hessian singular)``.
        seconds: time taken to prune it.
        scales: how its groups are rounded; None where they are not.
    """

    name: str
    pattern: str
    density: float
    error: float | None
    outcome: str
    seconds: float
    scales: GroupScales | None = field(default=None, compare=False, repr=False)

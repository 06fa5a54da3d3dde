"""What a compression reports: its progress, and the result for each linear layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from semisparse.quant.group import GroupScales


class Progress(Protocol):
    """A callback for the progress of a compression."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` steps of a stage are finished; in pruning a step is a linear layer."""


@dataclass(frozen=True)
class LayerReport:
    """The result for one linear layer.

    Args:
        name: module name in the model.
        pattern: written form.
        density: fraction of weights that are not zero, 0 to 1.
        error: relative error of the output over the calibration tokens, ``||(w' - w) x|| / ||w x||``; None if it was
            not measured.
        outcome: what was done, such as ``sparsegpt`` or ``wanda (hessian singular)``.
        seconds: wall time of pruning.
        scales: of the quantised groups; None if the weight is not quantised.
    """

    name: str
    pattern: str
    density: float
    error: float | None
    outcome: str
    seconds: float
    scales: GroupScales | None = field(default=None, compare=False, repr=False)


def density_of(weight: Tensor) -> float:
    """Return the fraction of weights that are not zero."""
    return int(weight.count_nonzero()) / weight.numel()

"""Second moments of a linear layer's calibration inputs: all that the pruners need to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from semisparse.compress.three_pass import multiplier, outer_sum
from semisparse.errors import InputError


@dataclass(frozen=True)
class Statistics:
    """Means over the calibration tokens for one linear layer ``y = x @ w.T``.

    Args:
        hessian: [K, K] float32, mean of x x^T; x is the input in the compressed model.
        cross: [N, K] float32, mean of t x^T; t is the target of the output for x. None if the target is ``w x``.
        note: added to the report; empty if the means are over the tokens that the layer reads.
    """

    hessian: Tensor
    cross: Tensor | None = None
    note: str = ""


class RunningSums:
    """Sums over the calibration tokens, in float32, for linear layers that share their input.

    For each token, x is the input in the compressed model and X the input in the dense model. The target of a linear
    layer is ``w X``. If the layer adds to the residual stream, its target is ``w X + r``; r is the residual stream in
    the dense model minus that in the compressed model. The sums of x x^T, X x^T and r x^T thus serve every layer.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    @property
    def tokens(self) -> int:
        """How many tokens were added."""
        return self._tokens

    def add(self, inputs: Tensor, dense_inputs: Tensor | None, gaps: Mapping[str, Tensor]) -> None:
        """Add the tokens of a batch.

        Args:
            inputs: x, [tokens, K], any float dtype.
            dense_inputs: X of the same tokens, [tokens, K]; None if the target is ``w x``.
            gaps: r, [tokens, N], by name of each linear layer that adds to the residual stream.
        """
        x = inputs.float()
        self._tokens += len(x)
        self._accumulate("inputs", x, x)
        if dense_inputs is not None:
            self._accumulate("dense", dense_inputs.float(), x)
        for name, gap in gaps.items():
            self._accumulate(f"gap {name}", gap.float(), x)

    def merge(self, other: RunningSums) -> RunningSums:
        """Add the sums over other tokens, and return the result: this object, changed in place."""
        self._tokens += other._tokens
        for key, total in other._sums.items():
            self._sums[key] = self._sums[key].add_(total) if key in self._sums else total
        return self

    def statistics(self, name: str, weight: Tensor) -> Statistics:
        """Return the `Statistics` of one of the linear layers.

        Args:
            name: of the linear layer.
            weight: its dense weight, [N, K] float32.

        Raises:
            InputError: no token was added.
        """
        if not self._tokens:
            raise InputError("no calibration token reached it; use more samples, or list it under 'ignore'")
        means = {key: total / self._tokens for key, total in self._sums.items()}
        if "dense" not in means:
            return Statistics(means["inputs"])
        return Statistics(means["inputs"], multiplier(means["dense"])(weight) + means.get(f"gap {name}", 0))

    def _accumulate(self, key: str, left: Tensor, right: Tensor) -> None:
        """Add ``left^T right`` to a sum."""
        if key not in self._sums:
            self._sums[key] = left.new_zeros(left.shape[1], right.shape[1])
        if left.is_cuda:
            self._sums[key] += outer_sum(left, right)
        else:
            self._sums[key].addmm_(left.T, right)

"""Second moments of a layer's calibration inputs: all that the pruners need to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from semisparse.errors import InputError


@dataclass(frozen=True)
class Statistics:
    """Means over the calibration tokens for one layer ``y = x @ w.T``.

    Args:
        hessian: [K, K] float32, mean of x x^T, x being the layer's input in the compressed model.
        cross: [N, K] float32, mean of t x^T, t being the output wanted for x; None where it is ``w x``.
    """

    hessian: Tensor
    cross: Tensor | None = None


class RunningSums:
    """Sums over calibration tokens for layers that share their input, in float32.

    For each token, x is the input in the compressed model and X in the dense one. A layer aims at ``w X``, plus the
    gap r between the dense and the compressed residual stream if it adds to that stream. So three sums serve every
    layer: x x^T, X x^T and r x^T.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, dense_inputs: Tensor | None, gaps: Mapping[str, Tensor]) -> None:
        """Add the tokens of a batch.

        Args:
            inputs: x, [tokens, K], any float dtype.
            dense_inputs: X, [tokens, K], the same tokens; None where the layers aim at ``w x``.
            gaps: r, [tokens, N], for each layer that adds to the residual stream.
        """
        x = inputs.float()
        self._tokens += len(x)
        self._accumulate("inputs", x, x)
        if dense_inputs is not None:
            self._accumulate("dense", dense_inputs.float(), x)
        for name, gap in gaps.items():
            self._accumulate(f"gap {name}", gap.float(), x)

    def of_layer(self, name: str, weight: Tensor) -> Statistics:
        """Give the means for one of the layers, `weight` ([N, K] float32) being its dense weight.

        Raises:
            InputError: no token was added.
        """
        if not self._tokens:
            raise InputError("no calibration token reached it; use more samples, or list it under 'ignore'")
        means = {key: total / self._tokens for key, total in self._sums.items()}
        if "dense" not in means:
            return Statistics(means["inputs"])
        return Statistics(means["inputs"], weight @ means["dense"] + means.get(f"gap {name}", 0))

    def _accumulate(self, key: str, left: Tensor, right: Tensor) -> None:
        if key not in self._sums:
            self._sums[key] = torch.zeros(left.shape[1], right.shape[1], device=left.device)
        self._sums[key].addmm_(left.T, right)

"""Second moments of a layer's calibration inputs: all that the pruners need to know of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Means over calibration tokens for one layer ``y = x @ w.T``.

    Args:
        hessian: [K, K] float32, mean of x x^T, x being the layer's input in the compressed model.
        cross: [N, K] float32, mean of t x^T, t being the output that the layer should give for x;
            None where that is its own dense output, t = w x.
    """

    hessian: Tensor
    cross: Tensor | None = None


class RunningSums:
    """Sums over the calibration tokens for layers that share their input.

    With x the input in the compressed model, X the same token's input in the dense model and r what a layer should
    add besides its own dense output (the residual stream's error before it): x x^T, X x^T and r x^T.
    """

    def __init__(self, features: int, device: torch.device) -> None:
        self._inputs = torch.zeros(features, features, device=device)
        self._dense = torch.zeros(features, features, device=device)
        self._gaps: dict[str, Tensor] = {}
        self._tokens = 0
        self._has_dense = False

    def add(self, inputs: Tensor, dense_inputs: Tensor | None, gaps: dict[str, Tensor]) -> None:
        """Add tokens.

        Args:
            inputs: [tokens, K] any float dtype.
            dense_inputs: [tokens, K], the same tokens in the dense model; None if the layers aim at no dense output.
            gaps: for each layer that writes to the residual stream, [tokens, N] dense minus compressed stream.
        """
        x = inputs.float()
        self._tokens += len(x)
        self._inputs.addmm_(x.T, x)
        if dense_inputs is None:
            return
        self._has_dense = True
        self._dense.addmm_(dense_inputs.float().T, x)
        for name, gap in gaps.items():
            if name not in self._gaps:
                self._gaps[name] = torch.zeros(gap.shape[1], x.shape[1], device=x.device)
            self._gaps[name].addmm_(gap.float().T, x)

    def of_layer(self, name: str, weight: Tensor) -> Statistics:
        """Give the means for one of the layers.

        Args:
            name: the layer.
            weight: [N, K] float32, its dense weight.
        """
        count = max(self._tokens, 1)
        hessian = self._inputs / count
        if not self._has_dense:
            return Statistics(hessian)
        cross = weight @ (self._dense / count)
        if name in self._gaps:
            cross += self._gaps[name] / count
        return Statistics(hessian, cross)

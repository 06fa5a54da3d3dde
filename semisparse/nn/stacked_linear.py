"""A fused layer: several packed weights on one input, such as a model's query, key and value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from semisparse.formats.base import Packed
from semisparse.nn.sparse_linear import SparseLinear
from semisparse.nn.stacking import stack_neighbours


class StackedLinear(nn.Module):
    """``y = x @ w.T + bias``, where w is several packed weights stacked along N.

    Neighbouring weights are computed by one matmul where `stack_neighbours` can stack them.

    Args:
        weights: [N_i, K] each, of any formats and patterns.
    """

    def __init__(self, weights: Sequence[Packed]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SparseLinear(weight) for weight in stack_neighbours(weights))
        self.sizes = [layer.out_features for layer in self.layers]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ w.T + bias``.

        Args:
            x: [..., K], float16, bfloat16 or float32.
            bias: [sum of N_i] or None.
        Returns:
            [..., sum of N_i] in x's dtype.
        Raises:
            KernelError: no kernel can compute a matmul; lists every candidate's reason.
        """
        biases = [None] * len(self.sizes) if bias is None else bias.split(self.sizes)
        outputs = [layer(x, part) for layer, part in zip(self.layers, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

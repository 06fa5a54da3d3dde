"""Linear layers whose groups are rounded while they are trained: weights, scales and zero points together (BQPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from semisparse.nn import weight_of
from semisparse.quant.group import GroupScales, fake_quantise, stored_groups, straight_through

SCALE_RATE = 0.3
"""Learning rate of scales and zero points, as a share of the weights'."""


class RoundedWeight(nn.Module):
    """A parametrisation of a linear layer's weight: rounded in groups, dropped groups zero.

    Scales are trained by the logarithm of what they are multiplied by, zero points by a shift in codes, so that one
    learning rate suits every group.

    Args:
        linear: the layer; its weight has the rounding already.
        scales: of its groups, in the dtype that they are stored in.
    """

    def __init__(self, linear: nn.Module, scales: GroupScales) -> None:
        super().__init__()
        weight = weight_of(linear)
        self._start = scales
        self._turned = weight.shape != linear.get_parameter("weight").shape or weight.stride(-1) != 1
        kept = stored_groups(weight, scales.size).repeat_interleave(scales.size, dim=1)
        self._kept = kept[:, : weight.shape[1]].to(weight.dtype)
        self.stretch = nn.Parameter(torch.zeros_like(scales.scale, dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros_like(scales.zero, dtype=torch.float32))

    def forward(self, weight: Tensor) -> Tensor:
        """Round the layer's own weight parameter."""
        rows = weight.T if self._turned else weight
        start = self._start
        scale, zero = self._exact()
        stored = straight_through(scale.to(start.scale.dtype).float(), scale)
        point = straight_through(zero.round(), zero).clamp(0, 255)
        rounded = fake_quantise(rows, stored, point, start.bits, start.size) * self._kept
        return rounded.T if self._turned else rounded

    @property
    def scales(self) -> GroupScales:
        """The scales and zero points as they are stored."""
        scale, zero = self._exact()
        stored = scale.detach().to(self._start.scale.dtype)
        return replace(self._start, scale=stored, zero=zero.detach().round().clamp(0, 255))

    def _exact(self) -> tuple[Tensor, Tensor]:
        scale = self._start.scale.float() * self.stretch.exp()
        return scale, self._start.zero + self.shift * 2.0 ** (8 - self._start.bits)

    def group(self, rate: float) -> dict[str, Any]:
        """Give the parameters with their learning rate, as torch's optimisers take them."""
        return {"params": [self.stretch, self.shift], "lr": SCALE_RATE * rate}


def round_while_training(linear: nn.Module, scales: GroupScales) -> RoundedWeight:
    """Put the rounding into a layer's forward."""
    rounding = RoundedWeight(linear, scales)
    parametrize.register_parametrization(linear, "weight", rounding)
    return rounding


def end_rounding(linear: nn.Module) -> None:
    """Leave a layer with its rounded weight as a plain parameter."""
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)

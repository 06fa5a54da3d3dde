"""What is trained of rounded layers: scales and zero points, of weights that are rounded anew or of fixed codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from semisparse.nn import weight_of
from semisparse.quant.group import GroupScales, fake_quantise, stored_groups, straight_through


class TrainedScales(nn.Module):
    """A layer's scales by the logarithm of what they are multiplied by, its zero points by a shift in codes.

    So one learning rate suits every group.

    Args:
        scales: to start from, in the dtype that they are stored in.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, scales: GroupScales) -> None:
        super().__init__()
        self._bits, self._size = scales.bits, scales.size
        self.register_buffer("scale", scales.scale)
        self.register_buffer("zero", scales.zero)
        self.stretch = nn.Parameter(torch.zeros_like(scales.scale, dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros_like(scales.zero, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Give scales and stored zero points as they will be stored, both float32, with gradients."""
        scale = self.scale.float() * self.stretch.exp()
        zero = self.zero + self.shift * 2.0 ** (8 - self._bits)
        stored = straight_through(scale.to(self.scale.dtype).float(), scale)
        return stored, straight_through(zero.round(), zero).clamp(0, 255)

    @property
    @torch.no_grad()
    def scales(self) -> GroupScales:
        """The scales as they are stored."""
        scale, zero = self()
        return GroupScales(self._bits, self._size, scale.to(self.scale.dtype), zero)

    def group(self, rate: float) -> dict[str, Any]:
        """Give the parameters with their learning rate, as torch's optimisers take them."""
        return {"params": [self.stretch, self.shift], "lr": rate}


class _RoundedWeight(nn.Module):
    """A parametrisation of a layer's weight: rounded in groups, dropped groups zero."""

    def __init__(self, linear: nn.Module, scales: TrainedScales, start: GroupScales) -> None:
        super().__init__()
        weight = weight_of(linear)
        kept = stored_groups(weight, start.size).repeat_interleave(start.size, dim=1)
        self._kept = kept[:, : weight.shape[1]].to(weight.dtype)
        self._bits, self._size = start.bits, start.size
        self._turned = weight.stride(-1) != 1 or weight.shape != linear.get_parameter("weight").shape
        self.scales = scales

    def forward(self, weight: Tensor) -> Tensor:
        """Round the layer's own weight parameter."""
        rows = weight.T if self._turned else weight
        scale, zero = self.scales()
        rounded = fake_quantise(rows, scale, zero, self._bits, self._size) * self._kept
        return rounded.T if self._turned else rounded


def round_while_training(linear: nn.Module, scales: GroupScales) -> TrainedScales:
    """Put the rounding into a layer's forward: its weight parameter is rounded wherever it is used."""
    trained = TrainedScales(scales)
    parametrize.register_parametrization(linear, "weight", _RoundedWeight(linear, trained, scales))
    return trained


def end_rounding(linear: nn.Module) -> None:
    """Leave a layer with its rounded weight as a plain parameter."""
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


class CodedLinear(nn.Module):
    """A linear layer that holds its weight in codes, a byte each, and trains their scales and zero points.

    Args:
        linear: the layer that it stands for.
        scales: of the layer's weight, which is rounded already.
    """

    def __init__(self, linear: nn.Module, scales: GroupScales) -> None:
        super().__init__()
        weight = weight_of(linear)
        self._columns, self._dtype = weight.shape[1], scales.scale.dtype
        self._point_unit = 2.0 ** (scales.bits - 8)
        self.register_buffer("codes", scales.codes(weight))
        self.register_buffer("kept", stored_groups(weight, scales.size))
        self.bias: Tensor | None = getattr(linear, "bias", None)
        self.scales = TrainedScales(scales)

    def weight(self) -> Tensor:
        """Give the weight [N, K] that is stored, in its dtype, with gradients."""
        scale, zero = self.scales()
        codes = self.codes.float() - (zero * self._point_unit)[..., None]
        return (codes * (scale * self.kept)[..., None]).flatten(1)[:, : self._columns].to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., K] to [..., N]."""
        return F.linear(x, self.weight().to(x.dtype), self.bias)

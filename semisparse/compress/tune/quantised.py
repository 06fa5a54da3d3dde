"""Linear layers with trainable scales and zero points; their weights are trainable too, or fixed codes (integers)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from semisparse.nn import weight_of
from semisparse.quant.group import GroupScales, dequantise, stored_groups, straight_through, straight_through_codes


class TrainableScales(nn.Module):
    """Scales and zero points as parameters.

    The parameters are the logarithm of a factor on each scale, and a shift of each zero point in units of one code. One
    learning rate then suits every group. The zero points of symmetric quantisation are fixed.

    Args:
        scales: the initial scales and zero points, in the dtypes that they are stored in.
    """

    scale: Tensor
    zero: Tensor

    def __init__(self, scales: GroupScales) -> None:
        super().__init__()
        self.bits, self._size, self._symmetric = scales.bits, scales.size, scales.symmetric
        self.register_buffer("scale", scales.scale)
        self.register_buffer("zero", scales.zero)
        self.log_factor = nn.Parameter(torch.zeros_like(scales.scale, dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros_like(scales.zero, dtype=torch.float32), not scales.symmetric)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return scales and stored zero points, float32, rounded as they will be stored, with gradients."""
        scale = self.scale.float() * self.log_factor.exp()
        zero = self.zero + self.shift * 2.0 ** (8 - self.bits)
        stored = straight_through(scale.to(self.scale.dtype).float(), scale)
        return stored, straight_through(zero.round(), zero).clamp(0, 255)

    @property
    @torch.no_grad()
    def group_scales(self) -> GroupScales:
        """The present scales and zero points, in the dtypes that they are stored in."""
        scale, zero = self()
        return GroupScales(self.bits, self._size, scale.to(self.scale.dtype), zero, self._symmetric)

    def param_group(self, lr: float) -> dict[str, Any]:
        """Return the parameters as an optimiser's parameter group."""
        return {"params": [self.log_factor, *([] if self._symmetric else [self.shift])], "lr": lr}


class _FakeQuantised(nn.Module):
    """A parametrisation that quantises and dequantises a linear layer's weight in groups; pruned weights stay zero.

    Codes come from the weight and the initial scales and zero points, so that new scales do not change them: the
    gradient of a scale is that of its codes' values. Were a weight divided by the present scale, its straight-through
    gradient would not depend on the scale at all until codes change, and the optimiser would follow rounding errors.

    Pruned groups are masked. Single pruned weights need no mask: symmetric quantisation has a code for zero.
    """

    def __init__(self, linear: nn.Module, scales: TrainableScales, initial: GroupScales) -> None:
        super().__init__()
        weight = weight_of(linear)
        self._groups = stored_groups(weight, initial.size)
        self._bits, self._size = initial.bits, initial.size
        self._transposed = weight.stride(-1) != 1 or weight.shape != linear.get_parameter("weight").shape
        self.scales = scales
        with torch.no_grad():
            self._scale, self._zero = (each.contiguous() for each in scales())
        self._kept: Tensor | None = None
        if not has_tuning_kernel(weight):
            kept = self._groups.repeat_interleave(initial.size, dim=1)
            self._kept = kept[:, : weight.shape[1]].to(weight.dtype)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the fake-quantised weight, in the shape of the linear layer's own parameter."""
        rows = weight.T if self._transposed else weight
        scale, zero = self.scales()
        if self._kept is None:
            quantised = self._by_kernel(rows, scale, zero)
        else:
            codes = straight_through_codes(rows, self._scale, self._zero, self._bits, self._size)
            quantised = dequantise(codes, scale, zero, self._bits)[:, : rows.shape[1]] * self._kept
        return quantised.T if self._transposed else quantised

    def _by_kernel(self, rows: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        from semisparse.compress.tune.quantised_triton import FakeQuantise, Groups

        groups = Groups(self._scale, self._zero, self._groups, self._bits, self._size)
        quantised: Tensor = FakeQuantise.apply(rows, scale, zero, groups)
        return quantised


def has_tuning_kernel(weight: Tensor) -> bool:
    """Return whether the Triton kernels of quantised_triton.py quantise this weight while it is tuned."""
    return weight.is_cuda and weight.dtype == torch.float32 and find_spec("triton") is not None


def add_fake_quantisation(linear: nn.Module, scales: GroupScales) -> TrainableScales:
    """Fake-quantise a linear layer's weight in its forward pass; return the trainable scales and zero points."""
    trainable = TrainableScales(scales)
    parametrize.register_parametrization(linear, "weight", _FakeQuantised(linear, trainable, scales))
    return trainable


def remove_fake_quantisation(linear: nn.Module) -> None:
    """Make the fake-quantised weight the linear layer's plain parameter again."""
    parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


class QuantisedLinear(nn.Module):
    """A linear layer that stores its weight as codes, one byte each, with trainable scales and zero points.

    Args:
        linear: the linear layer to replace; its weight is quantised already.
        scales: the scales and zero points of its weight.
    """

    def __init__(self, linear: nn.Module, scales: GroupScales) -> None:
        super().__init__()
        weight = weight_of(linear)
        self._columns, self._dtype = weight.shape[1], scales.scale.dtype
        self._zero_unit = 2.0 ** (scales.bits - 8)
        self.register_buffer("codes", scales.codes(weight))
        self.register_buffer("kept", stored_groups(weight, scales.size))
        self.bias: Tensor | None = getattr(linear, "bias", None)
        self.scales = TrainableScales(scales)

    def weight(self) -> Tensor:
        """Return the dequantised weight [N, K], in the dtype of the scales, with gradients."""
        scale, zero = self.scales()
        codes = self.codes.float() - (zero * self._zero_unit)[..., None]
        return (codes * (scale * self.kept)[..., None]).flatten(1)[:, : self._columns].to(self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x @ w.T + bias``: [..., K] to [..., N]."""
        return F.linear(x, self.weight().to(x.dtype), self.bias)

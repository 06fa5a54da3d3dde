"""Quantise a weight's groups column by column, inside the SparseGPT loop (GQSA, section 3.2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from semisparse.quant.group import GroupScales, scales_of


class ColumnQuantiser:
    """Quantises one column at a time. A group's scales are computed at its first column, from its kept weights.

    Args:
        bits: per code.
        size: columns per group; the first group starts at column 0.
        units: [K] float32, the factor that each column of the weight was multiplied by; codes are of the unscaled
            weight.
        dtype: of the scales.
    """

    def __init__(self, bits: int, size: int, units: Tensor, dtype: torch.dtype) -> None:
        self._bits, self._size, self._units, self._dtype = bits, size, units, dtype
        self._groups: list[GroupScales] = []

    @property
    def scales(self) -> GroupScales:
        """The scales of all groups so far, in column order."""
        scale = torch.cat([group.scale for group in self._groups], dim=1)
        zero = torch.cat([group.zero for group in self._groups], dim=1)
        return replace(self._groups[0], scale=scale, zero=zero)

    def fake_quantise(self, weight: Tensor, kept: Tensor, column: int) -> Tensor:
        """Quantise and dequantise one column. Columns must be passed in order.

        Args:
            weight: [N, K] float32; the columns before ``column`` are final.
            kept: [N, K] bool, the mask; final up to the end of the column's group.
            column: its index.
        Returns:
            [N] float32.
        """
        if column % self._size == 0:
            group = slice(column, column + self._size)
            unscaled = (weight[:, group] / self._units[group]).masked_fill(~kept[:, group], 0)
            self._groups.append(scales_of(unscaled, self._bits, self._size, self._dtype))
        scales = replace(self._groups[-1], size=1)
        values = scales.values(scales.codes(weight[:, column, None] / self._units[column]))
        return values.flatten().float() * self._units[column]

"""Rounding a weight's columns in groups while SparseGPT passes over them (GQSA, section 3.2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from semisparse.quant.group import GroupScales, scales_of


class Rounding:
    """Chooses a group's scale at its first column, from what is kept of it, and rounds column by column.

    Args:
        bits: of a code.
        size: columns of a group; the first group begins at the first column.
        units: [K] float32, what the weight's columns were multiplied by; codes are of the weight without that.
        dtype: of the scales.
    """

    def __init__(self, bits: int, size: int, units: Tensor, dtype: torch.dtype) -> None:
        self._bits, self._size, self._units, self._dtype = bits, size, units, dtype
        self._groups: list[GroupScales] = []

    @property
    def scales(self) -> GroupScales:
        """All groups', in the order of the columns."""
        scale = torch.cat([group.scale for group in self._groups], dim=1)
        zero = torch.cat([group.zero for group in self._groups], dim=1)
        return replace(self._groups[0], scale=scale, zero=zero)

    def round(self, weight: Tensor, kept: Tensor, i: int) -> Tensor:
        """Round column i of a weight [N, K] whose earlier columns are settled, `kept` ([N, K] bool) up to its group."""
        if i % self._size == 0:
            group = slice(i, i + self._size)
            left = (weight[:, group] / self._units[group]).masked_fill(~kept[:, group], 0)
            self._groups.append(scales_of(left, self._bits, self._size, self._dtype))
        single = replace(self._groups[-1], size=1)
        values = single.values(single.codes(weight[:, i, None] / self._units[i]))
        return values.flatten().float() * self._units[i]

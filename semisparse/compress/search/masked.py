"""Pruned weights in few bytes, as a mask and values or as codes; a candidate's weights are expanded from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semisparse.compress.journal import report_from_json, report_to_json
from semisparse.compress.prune import PrunedLayer
from semisparse.compress.report import LayerReport, density_of
from semisparse.patterns import Pattern
from semisparse.quant.group import GroupScales


class MaskedWeight(NamedTuple):
    """A pruned weight, stored as a mask and values, or if it is quantised as codes.

    Args:
        mask: [ceil(N K / 8)] uint8, one bit per weight, the lowest bit first; empty if all weights come from codes.
        values: [kept] in the model's dtype, the non-zero weights in row-major order. With codes uint8: those of all
            groups, of ``report.scales``; two in a byte if they have up to 4 bits, the first in the lower half.
        report: how the weight was pruned.
    """

    mask: Tensor
    values: Tensor
    report: LayerReport

    def to(self, device: torch.device) -> MaskedWeight:
        """Copy it to a device, to a GPU without waiting for what that still computes."""
        scales = self.report.scales
        if scales:
            scales = replace(scales, scale=_copied(scales.scale, device), zero=_copied(scales.zero, device))
        report = replace(self.report, scales=scales)
        return MaskedWeight(_copied(self.mask, device), _copied(self.values, device), report)

    @property
    def nbytes(self) -> int:
        """Its bytes, without those of the scales."""
        return self.mask.nbytes + self.values.nbytes


def to_masked(weight: Tensor, report: LayerReport) -> MaskedWeight:
    """Store a weight [N, K] with few bytes, on the CPU."""
    mask, values = _coded(weight, report.scales) or _masked(weight)
    scales = report.scales and report.scales.to(torch.device("cpu"))
    return MaskedWeight(mask.cpu(), values.cpu(), replace(report, scales=scales))


def _masked(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight's mask and non-zero values."""
    flat = weight.contiguous().view(-1)
    mask = flat != 0
    return _bits(mask), flat[mask]


def _bits(mask: Tensor) -> Tensor:
    """Return a flat mask with 8 weights in a byte."""
    bits = torch.nn.functional.pad(mask, (0, -len(mask) % 8)).view(-1, 8)
    return (bits << _bit_positions(mask.device)).sum(1, dtype=torch.uint8)


def _coded(weight: Tensor, scales: GroupScales | None) -> tuple[Tensor, Tensor] | None:
    """Return a quantised weight's mask and codes; None where they do not give exactly this weight."""
    if scales is None or scales.scale.dtype != weight.dtype:
        return None
    codes = scales.codes(weight)
    values = scales.values(codes).flatten(1)[:, : weight.shape[1]]
    kept = weight != 0
    if not torch.equal(values * kept, weight):
        return None
    needs_mask = bool((values != 0).logical_and(~kept).any())
    mask = _bits(kept.flatten()) if needs_mask else torch.empty(0, dtype=torch.uint8)
    flat = codes.flatten()
    if scales.bits > 4:
        return mask, flat
    low, high = torch.nn.functional.pad(flat, (0, len(flat) % 2)).view(-1, 2).unbind(1)
    return mask, low | high << 4


def to_dense(masked: MaskedWeight, like: Tensor) -> Tensor:
    """Expand a masked weight to the shape, dtype and device of ``like``."""
    packed_mask, values, report = masked.to(like.device)
    mask, scales = None, report.scales
    if len(packed_mask):
        bits = (packed_mask[:, None] >> _bit_positions(like.device)) & 1
        mask = bits.flatten()[: like.numel()].bool()
    if scales is None or values.dtype != torch.uint8:
        assert mask is not None
        weight = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        # Unlike weight[mask] = values, this does not wait for the GPU to count the mask's bits.
        return weight.masked_scatter_(mask, values.to(like.dtype)).view(like.shape)
    groups = scales.scale.shape
    if scales.bits <= 4:
        values = torch.stack((values & 15, values >> 4), 1).flatten()[: groups.numel() * scales.size]
    weight = scales.values(values.view(*groups, scales.size)).flatten(1)[:, : like.shape[1]].to(like.dtype)
    return weight + 0 if mask is None else weight.masked_fill(~mask.view(like.shape), 0)  # 0 + -0 is 0


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of a bank to a device, to a GPU without waiting for what it still computes."""
    pins = device.type == "cuda" and not tensor.is_cuda and tensor.numel() > 0
    return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)


def masked_layer(name: str, pattern: Pattern, layer: PrunedLayer, dtype: torch.dtype, seconds: float) -> MaskedWeight:
    """Cast a pruned weight to ``dtype``, and store it with its report."""
    weight = layer.weight.to(dtype)
    report = LayerReport(name, str(pattern), density_of(weight), layer.error, layer.outcome, seconds, layer.scales)
    return to_masked(weight, report)


def masked_to_json(masked: MaskedWeight, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Return a masked weight's report as JSON values, and add its tensors to ``tensors``, named after ``key``."""
    tensors |= {f"{key} mask": masked.mask, f"{key} values": masked.values}
    return report_to_json(masked.report, tensors, key)


def masked_from_json(notes: Mapping[str, Any], tensors: dict[str, Tensor], key: str) -> MaskedWeight:
    """Return the masked weight that `masked_to_json` wrote, and remove its tensors from ``tensors``."""
    mask, values = tensors.pop(f"{key} mask"), tensors.pop(f"{key} values")
    return MaskedWeight(mask, values, report_from_json(notes, tensors, key))


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

"""`quant.group.fake_quantise` with codes of other scales, and its gradients, as two Triton kernels.

In torch the weight is read and written some 20 times per step of tuning.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Weights per program, about."""


class Groups(NamedTuple):
    """What does not change while a weight [N, K] is tuned.

    Args:
        scale: [N, groups] float32, by which weights are divided to get codes.
        zero: [N, groups] float32, stored zero points for that.
        kept: [N, groups] bool, the groups that are not pruned.
        bits: per code.
        size: weights per group.
    """

    scale: Tensor
    zero: Tensor
    kept: Tensor
    bits: int
    size: int


@triton.jit
def _code(weight, scale, zero, last):
    """Return ``exact + (rounded - exact)`` as torch computes it, and the same clamped to a code."""
    exact = tl.div_rn(weight, tl.zeros_like(weight) + scale) + zero
    rounded = (exact + 12582912.0) - 12582912.0  # half to even
    rounded = tl.where(tl.abs(exact) < 4194304.0, rounded, exact)
    through = exact + (rounded - exact)
    return through, tl.minimum(tl.maximum(through, 0.0), last)


@triton.jit
def semisparse_fake_quantise(
    weight,
    scale,
    zero,
    code_scale,
    code_zero,
    kept,
    slope,
    out,
    scale_slope,
    zero_slope,
    rows,
    columns,
    groups,
    size,
    unit,
    last,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantise and dequantise groups of weight [rows, columns] to ``out``; or write its slopes, given that of ``out``.

    Grid: (ceil(rows / ROWS), groups). With BACKWARD ``slope`` is that of the quantised weight, and ``out`` gets that of
    the weight, ``scale_slope`` and ``zero_slope`` [rows, groups] those of ``scale`` and ``zero``. Zero points are
    stored in ``unit`` codes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, COLUMNS)
    column = tl.program_id(1) * size + inner
    inside = (row < rows)[:, None] & ((inner < size) & (column < columns))[None, :]
    at = row[:, None] * columns + column[None, :]
    group = row * groups + tl.program_id(1)
    own = row < rows
    scales = tl.load(scale + group, mask=own, other=1.0)[:, None]
    zeros = tl.load(zero + group, mask=own, other=0.0)[:, None] * unit
    first_scale = tl.load(code_scale + group, mask=own, other=1.0)[:, None]
    first_zero = tl.load(code_zero + group, mask=own, other=0.0)[:, None] * unit
    keeps = tl.load(kept + group, mask=own, other=0).to(tl.float32)[:, None]
    values = tl.load(weight + at, mask=inside, other=0.0)
    through, code = _code(values, first_scale, first_zero, last)
    if BACKWARD:
        gradient = tl.load(slope + at, mask=inside, other=0.0) * keeps
        of_code = gradient * scales
        of_weight = tl.where((through >= 0) & (through <= last), of_code, 0.0)
        tl.store(out + at, tl.div_rn(of_weight, tl.zeros_like(of_weight) + first_scale), mask=inside)
        tl.store(scale_slope + group, tl.sum(gradient * (code - zeros), axis=1), mask=own)
        tl.store(zero_slope + group, -tl.sum(of_code, axis=1) * unit, mask=own)
    else:
        tl.store(out + at, (code - zeros) * scales * keeps, mask=inside)


def _launch(weight: Tensor, scale: Tensor, zero: Tensor, slope: Tensor | None, groups: Groups) -> tuple[Tensor, ...]:
    rows, columns = weight.shape
    width = triton.next_power_of_2(groups.size)
    tile = max(1, TILE // width)
    out, of_scale, of_zero = torch.empty_like(weight), torch.empty_like(scale), torch.empty_like(zero)
    with torch.cuda.device_of(weight):  # where Triton launches
        semisparse_fake_quantise[(triton.cdiv(rows, tile), scale.shape[1])](
            weight,
            scale,
            zero,
            groups.scale,
            groups.zero,
            groups.kept,
            weight if slope is None else slope,
            out,
            of_scale,
            of_zero,
            rows,
            columns,
            scale.shape[1],
            groups.size,
            2.0 ** (groups.bits - 8),
            2.0**groups.bits - 1,
            BACKWARD=slope is not None,
            ROWS=tile,
            COLUMNS=width,
            enable_fp_fusion=False,  # products are rounded before they are added, as in torch
        )
    return out, of_scale, of_zero


class FakeQuantise(torch.autograd.Function):
    """Quantise and dequantise a weight, with straight-through gradients; pruned groups stay zero.

    Arguments: the weight [N, K] float32; scales and stored zero points, [N, groups] float32; the `Groups`, whose scales
    and zero points determine the codes.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, zero: Tensor, groups: Groups) -> Tensor:
        weight, scale, zero = weight.contiguous(), scale.contiguous(), zero.contiguous()
        ctx.save_for_backward(weight, scale, zero)
        ctx.groups = groups
        return _launch(weight, scale, zero, None, groups)[0]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, zero = ctx.saved_tensors
        return *_launch(weight, scale, zero, slope.contiguous(), ctx.groups), None

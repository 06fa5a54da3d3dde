"""Splitting a float32 matrix into the bfloat16 halves of `three_pass`, as one Triton kernel that reads it once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 256
"""The part of the matrix that a program splits."""


@triton.jit
def semisparse_split(
    x,
    out,
    rows,
    columns,
    row_stride,
    column_stride,
    out_stride,
    part,
    LOW_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write three halves of x [rows, columns], ``part`` numbers apart: high, high, low; with LOW_FIRST low, high, high.

    Grid: (ceil(rows / ROWS), ceil(columns / COLUMNS)).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0)
    high = values.to(tl.bfloat16)
    low = (values - high.to(tl.float32)).to(tl.bfloat16)
    at = out + row * out_stride + column
    tl.store(at, low if LOW_FIRST else high, mask=inside)
    tl.store(at + part, high, mask=inside)
    tl.store(at + part + part, high if LOW_FIRST else low, mask=inside)  # 2 * part may not fit in 32 bits


def split(x: Tensor, dim: int, low_first: bool) -> Tensor:
    """Return x [M, K] float32 as halves concatenated along a dimension: [3 M, K] or [M, 3 K] bfloat16."""
    rows, columns = x.shape
    shape = (3 * rows, columns) if dim == 0 else (rows, 3 * columns)
    out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    part = rows * columns if dim == 0 else columns
    with torch.cuda.device_of(x):  # where Triton launches
        semisparse_split[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
            x,
            out,
            rows,
            columns,
            x.stride(0),
            x.stride(1),
            shape[1],
            part,
            LOW_FIRST=low_first,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out

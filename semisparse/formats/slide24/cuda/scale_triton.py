"""The pass after cuSPARSELt's GEMM: scales of tokens and of rows, bias and cast, one read and one write of y."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_TOKENS, TILE_COLUMNS = 8, 512
"""Tokens and columns of y per program, which reads row scales and bias once for its tokens."""


@triton.jit
def semisparse_slide24_scale(
    unscaled, token_scales, row_scales, bias, y, tokens, columns, stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y = unscaled * token_scales * row_scales + bias."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    both = (token < tokens)[:, None] & inside[None, :]
    row = token.to(tl.int64)[:, None]
    value = tl.load(unscaled + row * stride + column[None, :], mask=both, other=0).to(tl.float32)
    if SCALED:
        by_token = tl.load(token_scales + token, mask=token < tokens, other=0.0)
        by_row = tl.load(row_scales + column, mask=inside, other=0.0)
        value = value * by_token[:, None] * by_row[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row * columns + column[None, :], value.to(y.dtype.element_ty), mask=both)


def scale_and_add(
    unscaled: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, m: int, n: int, dtype: torch.dtype
) -> Tensor:
    """Scale y, add the bias, and drop the padding.

    Args:
        unscaled: [at least M, at least N] contiguous; int32, bfloat16, float16 or float32.
        scales: of the tokens, [M] float32, and of the rows of w, [N] float32; None if the weight is not quantised.
        bias: [N] or None.
        m: tokens.
        n: rows of w.
        dtype: dtype of y.
    Returns:
        y [M, N].
    """
    y = torch.empty((m, n), dtype=dtype, device=unscaled.device)
    bias = None if bias is None else bias.contiguous()
    token_scales, row_scales = scales or (None, None)
    grid = (triton.cdiv(n, TILE_COLUMNS), triton.cdiv(m, TILE_TOKENS))
    with torch.cuda.device_of(unscaled):  # where Triton launches
        semisparse_slide24_scale[grid](
            unscaled, token_scales, row_scales, bias, y, m, n, unscaled.shape[1],
            TOKENS=TILE_TOKENS, COLUMNS=TILE_COLUMNS, SCALED=scales is not None, HAS_BIAS=bias is not None, num_warps=4,
        )  # fmt: skip
    return y

"""The pass after a product: scales of tokens and of rows, the bias, and the output's dtype, one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, COLUMNS = 8, 512
"""That a program holds: its row scales and bias are read once for so many tokens."""


@triton.jit
def semisparse_scale_product(
    product, token_scales, row_scales, bias, y, tokens, columns, stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one block of y = product * token_scales * row_scales + bias."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    both = (token < tokens)[:, None] & inside[None, :]
    place = token.to(tl.int64)[:, None]
    value = tl.load(product + place * stride + column[None, :], mask=both, other=0).to(tl.float32)
    if SCALED:
        by_token = tl.load(token_scales + token, mask=token < tokens, other=0.0)
        by_row = tl.load(row_scales + column, mask=inside, other=0.0)
        value = value * by_token[:, None] * by_row[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place * columns + column[None, :], value.to(y.dtype.element_ty), mask=both)


def scale_product(
    product: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, m: int, n: int, dtype: torch.dtype
) -> Tensor:
    """Scale a product, add the bias, and leave out what fills it up.

    Args:
        product: [at least M, at least N] contiguous; int32, bfloat16, float16 or float32.
        scales: of the tokens, [M] float32, and of the rows of the weight, [N] float32; None for a weight as it is.
        bias: [N] or None.
        m: tokens.
        n: rows of the weight.
        dtype: of the result.
    Returns:
        [M, N].
    """
    y = torch.empty((m, n), dtype=dtype, device=product.device)
    token_scales, row_scales = scales or (None, None)
    grid = (triton.cdiv(n, COLUMNS), triton.cdiv(m, TOKENS))
    semisparse_scale_product[grid](
        product, token_scales, row_scales, bias, y, m, n, product.shape[1],
        TOKENS=TOKENS, COLUMNS=COLUMNS, SCALED=scales is not None, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return y

"""Lifting in Triton for cuSPARSELt, quantised (algorithm 1) or not (equation 4): a program per token.

A group has WINDOWS windows. Window w of a token begins at column ``2 * (w + w // WINDOWS)``: two columns for each
window before it, and two more for each group before its own. x is read as words of two columns; a window is two words.
Offsets of tokens are 64-bit: at M = 65,536 and K' = 56,832 they exceed 2^31.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.slide24.storage.disk import lifted_columns
from semisparse.quant.symmetric import LARGEST
from semisparse.quant.triton_symmetric import EIGHT_BITS, round_to_bits, row_scale

TILE_WINDOWS, TILE_COLUMNS, WARPS = 1024, 2048, 8
"""Windows and columns per iteration, and warps, of a program that quantises. Of 27 combinations on an H200, this one is
within 7 % of the fastest for every K."""

TILE_WORDS = 2048
"""Words per iteration of a program that only lifts."""


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """Split a word into its two columns, as float32. A word has 64 bits if DTYPE is float32, else 32."""
    if DTYPE.primitive_bitwidth == 32:
        first, second = word.to(tl.int32), (word >> 32).to(tl.int32)
    else:
        first, second = word.to(tl.int16), (word >> 16).to(tl.int16)
    return first.to(DTYPE, bitcast=True).to(tl.float32), second.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def semisparse_slide24_quantise_and_lift(
    x, words, lifted, scales, columns, count, largest,
    WINDOWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Quantise and lift one token. ``count`` is its number of windows; a lifted window is a word of four bytes."""
    token = tl.program_id(0)
    start = token.to(tl.int64) * columns
    scale, inverse = row_scale(x + start, columns, largest, COLUMNS)
    tl.store(scales + token, scale)
    row = words + start // 2
    for first in range(0, count, TILE):
        window = first + tl.arange(0, TILE)
        word = window + window // WINDOWS
        a, b = _halves(tl.load(row + word, mask=2 * word < columns, other=0), x.dtype.element_ty)
        c, d = _halves(tl.load(row + word + 1, mask=2 * word + 2 < columns, other=0), x.dtype.element_ty)
        low = (round_to_bits(a, inverse, DTYPE) & 255) | (round_to_bits(b, inverse, DTYPE) & 255) << 8
        high = (round_to_bits(c, inverse, DTYPE) & 255) << 16 | round_to_bits(d, inverse, DTYPE) << 24
        tl.store(lifted + token.to(tl.int64) * count + window, low | high, mask=window < count)


@triton.jit
def semisparse_slide24_lift(words, lifted, columns, count, WINDOWS: tl.constexpr, TILE: tl.constexpr):
    """Lift one token, in words of two columns, half a window. ``columns`` and ``count`` count words of x and lifted."""
    token = tl.program_id(0)
    row = words + token.to(tl.int64) * columns
    for first in range(0, count, TILE):
        half = first + tl.arange(0, TILE)
        window = half // 2
        word = window + window // WINDOWS + half % 2
        value = tl.load(row + word, mask=word < columns, other=0)
        tl.store(lifted + token.to(tl.int64) * count + half, value, mask=half < count)


def quantise_and_lift(x: Tensor, dtype: torch.dtype, window: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Quantise each token at its own scale and lift it (algorithm 1).

    Args:
        x: [M, K] float, on a GPU.
        dtype: torch.int8 or torch.float8_e4m3fn.
        window: columns per group, 2N.
        tokens: rows of the result, at least M; those from M on are not written.
    Returns:
        [tokens, K'] of ``dtype``, and scales [M] float32.
    """
    x, words = _in_words(x)
    m, columns = x.shape
    lifted = torch.empty((tokens, lifted_columns(columns, window)), dtype=dtype, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    count = lifted.shape[1] // 4
    with torch.cuda.device_of(x):  # where Triton launches
        semisparse_slide24_quantise_and_lift[(m,)](
            x, words, lifted.view(torch.int32), scales, columns, count, LARGEST[dtype],
            WINDOWS=window // 2 - 1, COLUMNS=min(TILE_COLUMNS, triton.next_power_of_2(columns)),
            TILE=min(TILE_WINDOWS, triton.next_power_of_2(count)),
            DTYPE=EIGHT_BITS[dtype], enable_fp_fusion=False, num_warps=WARPS,
        )  # fmt: skip
    return lifted, scales


def lift(x: Tensor, window: int, tokens: int) -> Tensor:
    """Lift each token (equation 4).

    Args:
        x: [M, K], float16 or bfloat16, on a GPU.
        window: columns per group, 2N.
        tokens: rows of the result, at least M; those from M on are not written.
    Returns:
        [tokens, K'] in x's dtype.
    """
    x, words = _in_words(x)
    m, columns = x.shape
    lifted = torch.empty((tokens, lifted_columns(columns, window)), dtype=x.dtype, device=x.device)
    count = lifted.shape[1] // 2
    tile = min(TILE_WORDS, triton.next_power_of_2(count))
    with torch.cuda.device_of(x):  # where Triton launches
        semisparse_slide24_lift[(m,)](
            words, lifted.view(words.dtype), columns // 2, count, WINDOWS=window // 2 - 1, TILE=tile
        )  # fmt: skip
    return lifted


def _in_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, with K padded to an even number and aligned to words of two columns; and x viewed as such words."""
    x = F.pad(x, (0, 1)) if x.shape[1] % 2 else x.contiguous()
    if x.data_ptr() % (2 * x.element_size()):
        x = x.clone()
    return x, x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)

"""`lift` and `quantise_and_lift` as one Triton kernel each: a program for each token, one read of x and one write.

Window w of a row begins at column ``2 * (w + w // WINDOWS)``: two further for each window before it in its group, and
two more for each whole group. Offsets of rows are 64-bit: at M = 65,536 and K' = 56,832 they pass 2^31.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semisparse.formats.slide24.layout import lifted_columns
from semisparse.quant.symmetric import LARGEST
from semisparse.quant.triton_symmetric import BLOCK, round_to, row_scale

WINDOWS_AT_ONCE = 1024
"""That a program holds."""


@triton.jit
def _load_windows(row, windows, columns, WINDOWS: tl.constexpr):
    """Read the four columns of each window, [windows, 4], zero past the end."""
    column = 2 * (windows + windows // WINDOWS)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(row + column, mask=column < columns, other=0.0)


@triton.jit
def _quantise_and_lift(
    x, lifted, scales, columns, count, largest,
    WINDOWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TO_INT8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = x + token.to(tl.int64) * columns
    scale = row_scale(row, columns, largest, COLUMNS)
    tl.store(scales + token, scale)
    lifted_row = lifted + token.to(tl.int64) * count * 4
    for first in range(0, count, BLOCK):
        windows = first + tl.arange(0, BLOCK)
        values = _load_windows(row, windows, columns, WINDOWS).to(tl.float32)
        scaled = round_to(values, scale, largest, TO_INT8).to(lifted.dtype.element_ty)
        places = lifted_row + 4 * windows[:, None] + tl.arange(0, 4)[None, :]
        tl.store(places, scaled, mask=(windows < count)[:, None])


@triton.jit
def _lift(x, lifted, columns, count, WINDOWS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    row = x + token.to(tl.int64) * columns
    lifted_row = lifted + token.to(tl.int64) * count * 4
    for first in range(0, count, BLOCK):
        windows = first + tl.arange(0, BLOCK)
        values = _load_windows(row, windows, columns, WINDOWS)
        places = lifted_row + 4 * windows[:, None] + tl.arange(0, 4)[None, :]
        tl.store(places, values, mask=(windows < count)[:, None])


def quantise_and_lift(x: Tensor, dtype: torch.dtype, window: int) -> tuple[Tensor, Tensor]:
    """Round each token at its own scale and lift it (algorithm 1), as `lift.quantise_and_lift` does.

    Args:
        x: [M, K] float, on a GPU.
        dtype: torch.int8 or torch.float8_e4m3fn.
        window: columns of a group, 2N.
    Returns:
        [M, K'] of ``dtype``, and scales [M] float32.
    """
    x = x.contiguous()
    tokens, columns = x.shape
    lifted = torch.empty((tokens, lifted_columns(columns, window)), dtype=dtype, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    count = lifted.shape[1] // 4
    _quantise_and_lift[(tokens,)](
        x, lifted, scales, columns, count, LARGEST[dtype],
        WINDOWS=window // 2 - 1, COLUMNS=min(BLOCK, triton.next_power_of_2(columns)),
        BLOCK=min(WINDOWS_AT_ONCE, triton.next_power_of_2(count)), TO_INT8=dtype == torch.int8,
    )  # fmt: skip
    return lifted, scales


def lift(x: Tensor, window: int) -> Tensor:
    """Repeat columns as the windows overlap (equation 4), as `lift.lift` does.

    Args:
        x: [M, K], float16 or bfloat16, on a GPU.
        window: columns of a group, 2N.
    Returns:
        [M, K'] in x's dtype.
    """
    x = x.contiguous()
    tokens, columns = x.shape
    lifted = torch.empty((tokens, lifted_columns(columns, window)), dtype=x.dtype, device=x.device)
    count = lifted.shape[1] // 4
    block = min(WINDOWS_AT_ONCE, triton.next_power_of_2(count))
    _lift[(tokens,)](x, lifted, columns, count, WINDOWS=window // 2 - 1, BLOCK=block)
    return lifted

"""The activation's side: window j of a group reads columns 2j to 2j + 3 of it (section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from semisparse.formats.slide24.layout import padded_groups
from semisparse.quant.symmetric import quantise_rows


def lift(x: Tensor, window: int) -> Tensor:
    """Repeat columns as the windows overlap (equation 4).

    Args:
        x: [M, K], any dtype.
        window: columns of a group, 2N.
    Returns:
        [M, K'] in x's dtype; columns past K read as zero.
    """
    groups = padded_groups(x.shape[1], window)
    padded = F.pad(x, (0, groups * window - x.shape[1]))
    return padded.unflatten(1, (groups, window)).unfold(2, 4, 2).flatten(1)


def quantise_and_lift(x: Tensor, dtype: torch.dtype, window: int) -> tuple[Tensor, Tensor]:
    """Round each token at its own scale and lift it (algorithm 1).

    Args:
        x: [M, K] float.
        dtype: torch.int8, within -127 to 127, or torch.float8_e4m3fn, within -448 to 448.
        window: columns of a group, 2N.
    Returns:
        [M, K'] of ``dtype``, and scales [M] float32; a token of zeros has scale 1.
    """
    return quantise_rows(lift(x, window), dtype)

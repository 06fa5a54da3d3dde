"""Activations in 8 bits, a scale a token, for the kind ``w4a8`` (GQSA, appendix C)."""

from __future__ import annotations

import torch
from torch import Tensor

from semisparse.formats.base import Params
from semisparse.quant import symmetric


def rounds_activations(params: Params) -> bool:
    """Say whether a weight of such params is multiplied by rounded activations."""
    return str(params.get("kind")).endswith("a8")


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each token to int8 at its own scale.

    Args:
        x: [M, K] float.
    Returns:
        [M, K] int8 and scales [M] float32, as `quant.symmetric.quantise_rows` gives them on every device.
    """
    if x.device.type != "cuda":
        return symmetric.quantise_rows(x, torch.int8)
    from semisparse.quant.triton_symmetric import quantise_rows

    return quantise_rows(x, torch.int8)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each token of x, [M, K], to int8 and give it back in ``dtype``, for products that take no integers."""
    codes, scale = quantise_tokens(x)
    return (codes.float() * scale[:, None]).to(dtype)

"""Operands as the kernels of `gqs` read them."""

from __future__ import annotations

from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor that is contiguous and aligned to 16 bytes, as vector loads and cp.async need it."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

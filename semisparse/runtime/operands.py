"""Operands in the form in which CUDA kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is not contiguous and aligned to 16 bytes, as vector loads and cp.async need."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def bias_as(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias contiguous in a dtype; None if there is none."""
    return None if bias is None else bias.to(dtype).contiguous()

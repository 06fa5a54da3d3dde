"""The alignment that the kernels of `gqs` need of their operands."""

from __future__ import annotations

from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is not contiguous and aligned to 16 bytes, as vector loads and cp.async need."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

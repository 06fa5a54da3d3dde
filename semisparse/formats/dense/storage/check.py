"""Checks of stored tensors: a checkpoint is an untrusted file."""

from __future__ import annotations

import torch

from semisparse.errors import FormatError
from semisparse.formats.base import Packed


def check_content(packed: Packed) -> None:
    """Check that every value and scale is finite.

    Raises:
        FormatError: names the tensor.
    """
    for name, tensor in packed.tensors.items():
        if (tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn) and not tensor.float().isfinite().all():
            raise FormatError(f"tensor {name} holds a value that is not finite")

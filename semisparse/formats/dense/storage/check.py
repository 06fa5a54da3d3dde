"""Checks of stored tensors: a checkpoint is an untrusted file."""

from __future__ import annotations

import torch

from semisparse.formats.base import Packed, refuse_first, refuse_infinite


def check_content(packed: Packed) -> None:
    """Check that every value and scale is finite.

    Raises:
        FormatError: names the tensor.
    """
    for name, tensor in packed.tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            refuse_first((tensor.view(torch.uint8) & 0x7F) == 0x7F, name, "the value is not a number")
        elif tensor.is_floating_point():
            refuse_infinite(tensor, name)

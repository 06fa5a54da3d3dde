"""Torch's modes and defaults, which a caller may have set for code of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
"""Devices whose autocast a caller may have on."""


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Leave inference mode and autocast, and set the default dtype and device as torch starts with them, until the end.

    What runs inside names the dtypes and devices that differ from these. It tunes by gradients, which inference mode
    has none of, and promises the same bytes wherever it is called.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield

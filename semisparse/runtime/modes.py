"""Torch's modes and defaults, which a caller may have set for code of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
"""Devices whose autocast a caller may have on."""


@contextmanager
def thread_defaults() -> Iterator[None]:
    """Leave inference mode, autocast and the default device, which are of this thread alone, until the end.

    What runs inside names the dtypes and devices that differ from torch's own defaults. It may tune by gradients, which
    inference mode has none of.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Enter `thread_defaults`, and make float32 the default dtype: a compression writes the same bytes in any mode.

    The default dtype is shared by all threads of the process, and transformers sets it while it builds a model. Calls
    that may run beside another thread's, such as generating, therefore enter `thread_defaults` only.
    """
    with thread_defaults(), ExitStack() as stack:
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield

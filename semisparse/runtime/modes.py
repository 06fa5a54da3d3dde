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
    """Do the same, with float32 as the default dtype, so that the same bytes come out wherever this is called.

    The default dtype is the process's: other threads, which may load a model, see it change. So calls that are short or
    run beside others take `thread_defaults`.
    """
    with thread_defaults(), ExitStack() as stack:
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield

"""The device of a model, and where its packed weights go while transformers loads it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from semisparse.errors import InputError

_DEVICE: ContextVar[torch.device | None] = ContextVar("device", default=None)


def placement() -> torch.device | None:
    """Return the device of `placed_on`; None outside of it."""
    return _DEVICE.get()


@contextmanager
def placed_on(device: torch.device | None) -> Iterator[None]:
    """Load packed weights to a device, in the layout on disk, and check them there.

    A GPU checks a weight in a hundredth of a CPU's time. The caller arranges the layers afterwards, by `join_layers` or
    by moving the model: layers that are joined are then arranged once, after they have been joined.

    Args:
        device: None to leave weights where transformers puts them, and to arrange each.
    """
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def pick_device(device: str) -> torch.device:
    """Return the torch device for ``auto`` (CUDA if available), ``cpu``, ``cuda`` (the current GPU) or ``cuda:1``.

    A GPU that is named by its number becomes the current one, on which CUDA graphs are captured.

    Raises:
        InputError: the name is unknown, or there is no such CUDA device.
    """
    numbered = re.fullmatch(r"cuda:(\d{1,3})", device)
    if device not in ("auto", "cpu", "cuda") and numbered is None:
        raise InputError(f"unknown device {device!r}; it is auto, cpu, cuda or cuda:N, N the number of a GPU")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device}: torch finds no CUDA device on this machine")
    if numbered is not None:
        if int(numbered[1]) >= torch.cuda.device_count():
            raise InputError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices, from cuda:0")
        torch.cuda.set_device(int(numbered[1]))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)

"""The device on which transformers' `from_pretrained` puts packed weights, before they are checked and arranged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

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

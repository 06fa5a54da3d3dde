"""Copying tensors from mapped files to a GPU: several threads, each through pinned buffers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import local

import numpy as np
import torch
from torch import Tensor

THREADS = 8
"""Threads that copy."""

BUFFER_BYTES = 8 << 20
"""Bytes of a pinned buffer. Each thread has two: it fills one while the GPU reads the other."""


def on_device(
    names: Iterable[str], read: Callable[[str], Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, on a device, in the order of the names.

    Args:
        names: of the tensors.
        read: returns a tensor in host memory, perhaps a mapped file; called by several threads.
        device: the CPU leaves tensors where they are.
    """
    names = list(names)
    if device.type != "cuda":
        yield from ((name, read(name).to(device)) for name in names)
        return
    copier = _Copier(device)
    with ThreadPoolExecutor(THREADS) as pool:
        yield from zip(names, pool.map(lambda name: copier(read(name)), names), strict=True)


class _Copier:
    """Copies tensors to a GPU; for several threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its number, which `set_device` wants
        self._own = local()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy on the GPU, complete."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = tensor.reshape(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        stream, buffers = self._resources()
        stream.wait_stream(torch.cuda.default_stream(self._device))  # the memory may have been another tensor's
        for index, start in enumerate(range(0, len(source), BUFFER_BYTES)):
            buffer, read = buffers[index % 2]
            part = source[start : start + BUFFER_BYTES]
            read.synchronize()
            # By numpy, in this thread alone: torch would start a team of threads for each of these threads.
            np.copyto(buffer[: len(part)].numpy(), part.numpy())
            with torch.cuda.stream(stream):
                target[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
                read.record(stream)
        stream.synchronize()
        return copy

    def _resources(self) -> tuple[torch.cuda.Stream, list[tuple[Tensor, torch.cuda.Event]]]:
        """Return this thread's stream, and its pinned buffers with the events after which they may be filled again."""
        own = self._own
        if not hasattr(own, "stream"):
            torch.cuda.set_device(self._device)
            own.stream = torch.cuda.Stream(self._device)
            own.buffers = [
                (torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)
            ]
        return own.stream, own.buffers

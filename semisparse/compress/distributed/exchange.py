"""Exchange of Python values between processes: a value is pickled without its tensors, whose bytes follow."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from semisparse.errors import SemisparseError

WAIT = timedelta(days=30)
"""How long a process waits for another one, which may tune a model meanwhile. `watch` notices one that has died."""


class LostRank(SemisparseError):
    """Another process of the run does not answer."""


class Exchange:
    """The process group of a compression: gloo for tensors in host memory, NCCL for those on GPUs.

    Every process of the default group creates one, and calls the same methods in the same order.

    Args:
        device: where this process computes, with the index of torch's current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _naming_the_loss():
            self._host_group = dist.new_group(backend="gloo", timeout=WAIT)
            self._gpu_group = dist.new_group(backend="nccl", timeout=WAIT) if device.type == "cuda" else None

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of rank ``source``; those of other ranks are ignored."""
        with _naming_the_loss():
            if dist.get_rank() == source:
                content, tensors = _dump(value)
                dist.broadcast_object_list([content], source, group=self._host_group)
            else:
                received: list[Any] = [None]
                dist.broadcast_object_list(received, source, group=self._host_group)
                value, tensors = self._load(received[0])
            for tensor in tensors:
                dist.broadcast(_bytes_of(tensor), source, group=self._group(tensor))
        return value

    def send(self, value: Any, to: int) -> None:
        """Send a value to rank ``to``, which calls `receive`."""
        with _naming_the_loss():
            content, tensors = _dump(value)
            dist.send_object_list([content], to, group=self._host_group)
            for tensor in tensors:
                dist.send(_bytes_of(tensor), to, group=self._group(tensor))

    def receive(self, source: int) -> Any:
        """Return the value that rank ``source`` sends."""
        received: list[Any] = [None]
        with _naming_the_loss():
            dist.recv_object_list(received, source, group=self._host_group)
            value, tensors = self._load(received[0])
            for tensor in tensors:
                dist.recv(_bytes_of(tensor), source, group=self._group(tensor))
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. They hold no tensors."""
        values: list[Any] = [None] * dist.get_world_size()
        with _naming_the_loss():
            dist.all_gather_object(values, value, group=self._host_group)
        return values

    def _group(self, tensor: Tensor) -> Any:
        return self._gpu_group if tensor.is_cuda else self._host_group

    def _load(self, content: bytes) -> tuple[Any, list[Tensor]]:
        unpickler = _Unpickler(io.BytesIO(content), self._device)
        value = unpickler.load()
        return value, [tensor for tensor in unpickler.tensors if tensor.numel()]


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach().contiguous())
        return value.is_cuda, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Allocates tensors for those that were left out, and lists them. The sender is a process of the same run."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self.tensors: list[Tensor] = []

    def persistent_load(self, key: Any) -> Tensor:
        on_gpu, dtype, shape = key
        self.tensors.append(torch.empty(shape, dtype=dtype, device=self._device if on_gpu else "cpu"))
        return self.tensors[-1]


def _dump(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), [tensor for tensor in pickler.tensors if tensor.numel()]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def _naming_the_loss() -> Iterator[None]:
    """Turn an error of the process group into `LostRank`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of the process group
        raise LostRank(
            "another rank of this run has ended or cannot be reached; what it printed says why, and the same command "
            f"with --resume goes on ({str(error).splitlines()[0]})"
        ) from error

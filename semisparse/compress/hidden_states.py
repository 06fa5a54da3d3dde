"""Hidden states of calibration batches on disk, for models whose states are too many for memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semisparse.errors import SemisparseError


class StatesOnDisk(MutableSequence[Tensor]):
    """A list of tensors, each in a file that is mapped into memory.

    A file is unlinked once it is mapped, so the system deletes it when its tensor is freed, or when the process ends
    in any way.

    Args:
        directory: where the files are.
        device: to which a tensor is copied when it is read.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory, self._device = directory, device
        self._files: list[Tensor] = []

    def insert(self, index: int, states: Tensor) -> None:
        """Write a tensor to a new file.

        Raises:
            SemisparseError: the directory cannot be written, or the disk is full.
        """
        self._files.insert(index, _mapped(self._directory, states.shape, states.dtype).copy_(states))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        # On a CPU, too, it is a copy: mapped memory is aligned differently, so sums over it may be taken in another
        # order.
        return self._files[index].to(self._device, copy=True)

    def __setitem__(self, index: Any, states: Any) -> None:
        self._files[index].copy_(states)

    def __delitem__(self, index: Any) -> None:
        del self._files[index]


def empty_states(directory: Path | None, device: torch.device) -> MutableSequence[Tensor]:
    """Return an empty list of hidden states: in memory, or on disk if there is a directory."""
    return [] if directory is None else StatesOnDisk(directory, device)


def _mapped(directory: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a new file without a name."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".semisparse-states-", dir=directory)
        try:
            # Blocks are allocated now: a disk that is full later would end the process.
            os.posix_fallocate(descriptor, 0, max(1, shape.numel() * dtype.itemsize))
            return torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        raise SemisparseError(
            f"cannot write hidden states to {directory}: {error}; choose another --offload"
        ) from error

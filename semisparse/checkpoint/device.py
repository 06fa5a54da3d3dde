"""The device that a model is loaded to, by its name."""

from __future__ import annotations

import re

import torch

from semisparse.errors import InputError


def pick_device(device: str | torch.device) -> torch.device:
    """Return the torch device for ``auto`` (CUDA if available), ``cpu``, ``cuda`` (the current GPU) or ``cuda:1``.

    A GPU that is named by its number becomes the current one, on which CUDA graphs are captured.

    Raises:
        InputError: the name is unknown, or there is no such CUDA device.
    """
    device = str(device)
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

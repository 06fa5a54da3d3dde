"""Loading a model directory for inference, or to be compressed."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import PreTrainedModel

from semisparse.api.inspecting import inspect_directory
from semisparse.checkpoint import load_dense, load_model, pick_device
from semisparse.integrations.importers import Rounded, load_dequantised, quantised_elsewhere
from semisparse.nn import join_layers


def load(
    path: str | Path, device: str | torch.device = "auto", dtype: torch.dtype | None = None, verify: bool = False
) -> PreTrainedModel:
    """Load a model directory. On a GPU its layers are joined (`nn.join_layers`).

    A model that another tool quantised is dequantised, and a warning says so.

    Args:
        path: the directory.
        device: ``auto`` (CUDA if available), ``cpu`` or ``cuda``.
        dtype: of activations and dense weights. By default the checkpoint's dtype on a GPU, and float32 on a CPU.
        verify: whether to check the tensors' digests first.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: the device is unknown or absent.
    """
    if verify:
        inspect_directory(path, verify=True)
    method = quantised_elsewhere(path)
    if method is None:
        return load_model(path, device, dtype, join=join_layers)
    return _load_foreign(path, method, device, dtype)


def _load_foreign(
    path: str | Path, method: str, device: str | torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Load a directory that another tool quantised, and say that it is dequantised."""
    target = pick_device(device)
    warnings.warn(
        f"{path} was quantised by {method}: its weights are dequantised, and activations are not rounded; "
        f"`semisparse compress {path} --recipe keep --out DIR` keeps it small",
        stacklevel=3,
    )
    if dtype is None and target.type == "cpu":
        dtype = torch.float32
    return load_dequantised(path, dtype)[0].to(target)


def load_uncompressed(path: str | Path) -> tuple[PreTrainedModel, dict[str, Rounded]]:
    """Load a model that is to be compressed, on the CPU: dense, or quantised by another tool and then dequantised.

    Returns:
        The model, and what the other tool rounded each weight to, by the layer's name in the files.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: semisparse has compressed the model already, or a setting of the other tool is not supported.
    """
    return (load_dense(path), {}) if quantised_elsewhere(path) is None else load_dequantised(path)

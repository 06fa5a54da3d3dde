"""Loading a model directory to run it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from semisparse.checkpoint import load_model
from semisparse.nn import join_layers


def load(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model directory, dense or compressed, as `checkpoint.load_model` does; on a GPU its layers are joined."""
    model = load_model(path, device, dtype)
    if model.device.type == "cuda":
        join_layers(model)
    return model

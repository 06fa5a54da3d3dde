"""Loading model directories with transformers, after checking that they are whole."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from semisparse.checkpoint.directory import ModelDirectory, open_directory
from semisparse.errors import CheckpointError, InputError

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of attention that a config may name: transformers takes other names for code to download."""

NO_OWN_CODE = {"trust_remote_code": False}
"""A directory's own Python code is never run."""


def load_model(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model directory, dense or compressed, after checking that it is whole.

    Args:
        path: the directory.
        device: ``auto`` (CUDA if there is one), ``cpu`` or ``cuda``.
        dtype: of what is not packed; by default the checkpoint's, and float32 on a CPU, where half precision is slow.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
    """
    place = pick_device(device)
    if dtype is None and place.type == "cpu":
        dtype = torch.float32
    return _from_pretrained(open_directory(path), dtype or "auto").to(place)


def load_dense(path: str | Path) -> PreTrainedModel:
    """Load a dense model directory to the CPU, in its own dtype.

    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: it is compressed already.
    """
    directory = open_directory(path)
    if "quantization_config" in directory.config:
        raise InputError(f"{path} is compressed already; compress the dense model")
    return _from_pretrained(directory, "auto")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer.

    Raises:
        CheckpointError: there is none, or it is unreadable.
    """
    try:
        return AutoTokenizer.from_pretrained(path, **NO_OWN_CODE)
    except Exception as error:  # tokenizers raises bare Exceptions on malformed files
        raise CheckpointError(f"cannot load the tokenizer of {path}: {error}") from error


def pick_device(device: str) -> torch.device:
    """Resolve ``auto``, ``cpu`` or ``cuda``.

    Raises:
        InputError: the name is unknown, or there is no CUDA device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {device!r}; it is auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def refuse_other_code(directory: ModelDirectory) -> None:
    """Refuse a config that names code to download.

    Raises:
        CheckpointError: it does.
    """
    for key in ("attn_implementation", "_attn_implementation"):
        name = directory.config.get(key)
        if name is not None and name not in ATTENTIONS:
            raise CheckpointError(
                f"{directory.path}/config.json asks for {key} = {name!r}, which is code from elsewhere; "
                f"it may be one of: {', '.join(ATTENTIONS)}"
            )


def _from_pretrained(directory: ModelDirectory, dtype: torch.dtype | str) -> PreTrainedModel:
    refuse_other_code(directory)
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=dtype, use_safetensors=True, **NO_OWN_CODE
        ).eval()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {directory.path}: {error}") from error

"""Loading model directories with transformers, after checking that they are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from semisparse.checkpoint.directory import ModelDirectory, open_directory
from semisparse.errors import CheckpointError, InputError

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText)
"""transformers' classes that load language models, and multimodal models that generate text."""

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that a config may name. transformers treats any other name as code to download."""

NO_REMOTE_CODE = {"trust_remote_code": False}
"""Arguments with which transformers never runs Python code from a model directory."""


def load_model(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model directory, dense or compressed, after checking that it is complete.

    Args:
        path: the directory.
        device: ``auto`` (CUDA if available), ``cpu`` or ``cuda``.
        dtype: of activations and dense weights. By default the checkpoint's dtype on a GPU, and float32 on a CPU, where
            16-bit arithmetic is slow. Packed weights keep their dtype.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
    """
    target = pick_device(device)
    if dtype is None and target.type == "cpu":
        dtype = torch.float32
    return _from_pretrained(open_directory(path), dtype or "auto").to(target)


def load_dense(path: str | Path) -> PreTrainedModel:
    """Load a dense model directory to the CPU, in the checkpoint's dtype.

    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: the model is compressed already.
    """
    directory = open_directory(path)
    if "quantization_config" in directory.config:
        raise InputError(
            f"{path} is compressed already; compress the dense model, or one that `semisparse export --to dense` wrote"
        )
    return _from_pretrained(directory, "auto")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer.

    Raises:
        CheckpointError: the directory or its tokenizer is missing, or the tokenizer is unreadable.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"no model directory at {path}")
    try:
        return AutoTokenizer.from_pretrained(path, **NO_REMOTE_CODE)
    except Exception as error:  # tokenizers raises bare Exceptions on malformed files
        raise CheckpointError(f"cannot load the tokenizer of {path}: {error}") from error


def pick_device(device: str) -> torch.device:
    """Return the torch device for ``auto`` (CUDA if available), ``cpu`` or ``cuda``.

    Raises:
        InputError: the name is unknown, or there is no CUDA device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {device!r}; it is auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: torch finds no CUDA device on this machine")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def auto_class(config: PretrainedConfig) -> Any:
    """Return the one of `AUTO_CLASSES` that builds a config's model; if both do, the one its ``architectures`` names.

    Raises:
        CheckpointError: neither does.
    """
    classes = {auto: auto._model_mapping.get(type(config), None) for auto in AUTO_CLASSES}
    known = {auto: model_class for auto, model_class in classes.items() if model_class is not None}
    if not known or config.is_encoder_decoder:
        kind = (config.architectures or [config.model_type])[0]
        raise CheckpointError(
            f"{kind} is not supported; semisparse takes decoder-only transformers, and multimodal models with a text "
            "decoder"
        )
    named = [auto for auto, model_class in known.items() if model_class.__name__ in (config.architectures or ())]
    return (named or list(known))[0]


def refuse_remote_code(directory: ModelDirectory) -> None:
    """Refuse a config whose attention implementation is code to download.

    Raises:
        CheckpointError: the config names an attention implementation outside `ATTENTIONS`.
    """
    for key in ("attn_implementation", "_attn_implementation"):
        name = directory.config.get(key)
        if name is not None and name not in ATTENTIONS:
            raise CheckpointError(
                f"{directory.path}/config.json names {key} = {name!r}, which is code from elsewhere; "
                f"known: {', '.join(ATTENTIONS)}"
            )


def _from_pretrained(directory: ModelDirectory, dtype: torch.dtype | str) -> PreTrainedModel:
    refuse_remote_code(directory)
    try:
        config = AutoConfig.from_pretrained(directory.path, **NO_REMOTE_CODE)
        return (
            auto_class(config)
            .from_pretrained(directory.path, dtype=dtype, use_safetensors=True, **NO_REMOTE_CODE)
            .eval()
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {directory.path}: {error}") from error

"""Loading model directories with transformers, after checking that they are whole."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from semisparse.checkpoint import ModelDirectory, open_directory
from semisparse.errors import CheckpointError, InputError
from semisparse.nn import is_linear, join_layers, weight_of

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of attention that a config may name: transformers takes other names for code to download."""

OWN_CODE = {"trust_remote_code": False}
"""A directory's own Python code is never run."""


def load(path: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a model directory, dense or compressed, after checking that it is whole; on a GPU its layers are joined.

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
    model = _from_pretrained(open_directory(path), dtype or "auto")
    if place.type == "cuda":
        join_layers(model)
    return model.to(place)


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
        return AutoTokenizer.from_pretrained(path, **OWN_CODE)
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


def check_fits(path: str | Path) -> None:
    """Check that a directory's tensors are those of the model that its config.json describes.

    Raises:
        CheckpointError: the model cannot be built, or a tensor or layer has another shape than the model gives it.
    """
    directory = open_directory(path)
    _refuse_other_code(directory)
    try:
        config = AutoConfig.from_pretrained(directory.path, **OWN_CODE)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **OWN_CODE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"no model can be built from {path}/config.json: {error}") from error
    linears = {name: tuple(weight_of(module).shape) for name, module in model.named_modules() if is_linear(module)}
    for name, packed in directory.layers.items():
        if linears.get(name) != packed.shape:
            raise CheckpointError(
                f"layer {name} is stored as N, K = {packed.shape}; the model of config.json has "
                f"{linears.get(name, 'no such linear layer')}"
            )
    for name, parameter in model.named_parameters():
        header = directory.headers.get(name)
        if header is not None and header.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"tensor {name} is {list(header.shape)}, the model of config.json has {list(parameter.shape)}"
            )


def _refuse_other_code(directory: ModelDirectory) -> None:
    for key in ("attn_implementation", "_attn_implementation"):
        name = directory.config.get(key)
        if name is not None and name not in ATTENTIONS:
            raise CheckpointError(
                f"{directory.path}/config.json asks for {key} = {name!r}, which is code from elsewhere; "
                f"it may be one of: {', '.join(ATTENTIONS)}"
            )


def _from_pretrained(directory: ModelDirectory, dtype: torch.dtype | str) -> PreTrainedModel:
    _refuse_other_code(directory)
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=dtype, use_safetensors=True, **OWN_CODE
        ).eval()
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"cannot load {directory.path}: {error}") from error

"""Loading model directories with transformers, after checking that they are complete."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)

from semisparse.checkpoint.config import check_sizes, read_json, refuse_integers, refuse_unstored
from semisparse.checkpoint.device import pick_device
from semisparse.checkpoint.directory import ModelDirectory, open_directory, require_directory
from semisparse.checkpoint.placement import placed_on
from semisparse.errors import CheckpointError, InputError, SemisparseError

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText)
"""transformers' classes that load language models, and multimodal models that generate text."""

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that a config may name. transformers treats any other name as code to download."""

MAX_SHOWN = 64
"""Maximum characters of a file's value in a message."""

MAX_MESSAGE = 400
"""Maximum characters of another library's message."""

MAX_PATH = 4096
"""No longer path exists on usual systems."""

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
"""The files that hold a tokenizer's vocabulary."""

NO_REMOTE_CODE = {"trust_remote_code": False}
"""Arguments with which transformers never runs Python code from a model directory."""


def load_model(
    path: str | Path,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    join: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """Load a model directory, dense or compressed, after checking that it is complete.

    Args:
        path: the directory.
        device: ``auto`` (CUDA if available), ``cpu`` or ``cuda``.
        dtype: dtype of activations and dense weights. By default the checkpoint's dtype on a GPU, and float32 on a CPU,
            where 16-bit arithmetic is slow. Packed weights keep their dtype.
        join: called on a GPU, such as `nn.join_layers`, once the packed weights are there and before any is arranged.
    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
    """
    target = pick_device(device)
    if dtype is None and target.type == "cpu":
        dtype = torch.float32
    on_gpu = target.type == "cuda"
    with placed_on(target if on_gpu else None):
        model = _from_pretrained(open_directory(path), dtype or "auto")
    if join is not None and on_gpu:
        join(model)
    return model.to(target)  # arranges every layer that was not joined


def load_dense(path: str | Path) -> PreTrainedModel:
    """Load a dense model directory to the CPU, in the checkpoint's dtype.

    Raises:
        CheckpointError: the directory is missing, incomplete or corrupted.
        InputError: the model is compressed already.
    """
    directory = open_directory(path)
    if directory.config.get("quantization_config") is not None:
        raise InputError(
            f"{path} is compressed already; compress the dense model, or one that `semisparse export --to dense` wrote"
        )
    return _from_pretrained(directory, "auto")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer.

    Raises:
        CheckpointError: the directory or its tokenizer is missing, or the tokenizer is unreadable.
    """
    require_directory(Path(path))
    read_config(path)  # transformers reads it, too, and would call its faults the tokenizer's
    _refuse_tokenizers_elsewhere(Path(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **NO_REMOTE_CODE)
        tokens = len(tokenizer)
    except Exception as error:  # tokenizers raises bare Exceptions on malformed files
        if not any((Path(path) / name).exists() for name in VOCABULARIES):
            raise _no_tokenizer(path) from error
        raise _unreadable(f"cannot load the tokenizer of {path}", error) from error
    if not isinstance(tokenizer.model_max_length, int | float):
        raise CheckpointError(
            f"{path}: model_max_length is {str(tokenizer.model_max_length)[:MAX_SHOWN]!r} in tokenizer_config.json, "
            "expected a number"
        )
    if tokens <= len(tokenizer.all_special_tokens):  # transformers makes one without words where there are no files
        raise _no_tokenizer(path)
    return tokenizer


def _no_tokenizer(path: str | Path) -> CheckpointError:
    return CheckpointError(
        f"{path} has no tokenizer: copy tokenizer.json and tokenizer_config.json from where the model came"
    )


def _refuse_tokenizers_elsewhere(path: Path) -> None:
    """Refuse a tokenizer_config.json that names a file outside of the directory, if it exists.

    transformers 5.23 ignores such names, earlier versions read the file. Real ones are of the machine that wrote them.

    Raises:
        CheckpointError: names the file.
    """
    file = path / "tokenizer_config.json"
    for key, value in read_json(file).items() if file.exists() else ():
        if not (isinstance(value, str) and key.endswith("_file") and value.isprintable() and len(value) < MAX_PATH):
            continue
        other = Path(os.path.abspath(path / value))
        if other.exists() and not other.is_relative_to(os.path.abspath(path)):
            raise CheckpointError(f"{file} names the {key} {value}, expected a file of the directory itself")


def auto_class(config: PretrainedConfig) -> Any:
    """Return the one of `AUTO_CLASSES` that builds a config's model; if both do, the one its ``architectures`` names.

    Raises:
        CheckpointError: neither does, or the model has an encoder or is one.
    """
    named_classes = config.architectures or ()
    if not isinstance(named_classes, list | tuple) or not all(isinstance(name, str) for name in named_classes):
        raise CheckpointError(f"config.json: architectures is {str(named_classes)[:99]}, expected a list of names")
    classes = {auto: auto._model_mapping.get(type(config), None) for auto in AUTO_CLASSES}
    known = {auto: model_class for auto, model_class in classes.items() if model_class is not None}
    if not known or config.is_encoder_decoder or is_encoder(config):
        kind = (*named_classes, config.model_type)[0]
        raise CheckpointError(
            f"{kind} is not supported; semisparse takes decoder-only transformers, and multimodal models with a text "
            "decoder"
        )
    named = [auto for auto, model_class in known.items() if model_class.__name__ in named_classes]
    return (named or list(known))[0]


def is_encoder(config: PretrainedConfig) -> bool:
    """Return whether a config is an encoder's, such as BERT's: transformers builds it as a causal model, too."""
    return type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", True)


def refuse_remote_code(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a config whose attention implementation is code to download.

    Args:
        config: the content of config.json.
        path: the directory, for messages.
    Raises:
        CheckpointError: the config names an attention implementation outside `ATTENTIONS`.
    """
    for key in ("attn_implementation", "_attn_implementation"):
        name = config.get(key)
        if name is not None and name not in ATTENTIONS:
            raise CheckpointError(
                f"{path}/config.json names {key} = {str(name)[:99]!r}, which is code from elsewhere; "
                f"known: {', '.join(ATTENTIONS)}"
            )


def read_config(path: str | Path) -> PretrainedConfig:
    """Read the config of a model directory, without its ``quantization_config``. No weights are read.

    Raises:
        CheckpointError: config.json is missing, claims sizes that no model has, names code from elsewhere, or
            transformers cannot read it.
    """
    content = read_json(Path(path) / "config.json")
    check_sizes(content, path)
    refuse_remote_code(content, Path(path))
    kind = content.get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING:
        code = "; its code is in the directory, and is not run" if content.get("auto_map") else ""
        raise CheckpointError(f"{path}: transformers {__version__} has no model_type {kind!r}{code}")
    try:
        config = AutoConfig.from_pretrained(path, **NO_REMOTE_CODE)
    except Exception as error:  # transformers raises many types
        raise _unreadable(f"{path}/config.json cannot be read", error) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain_outputs(config)
    return config


def meta_model(directory: ModelDirectory) -> PreTrainedModel:
    """Return the model of a directory's config.json on the meta device, all layers dense.

    Raises:
        CheckpointError: transformers cannot build it, or it is not supported.
    """
    config = read_config(directory.path)
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, **NO_REMOTE_CODE)
    except SemisparseError:
        raise
    except Exception as error:  # transformers raises many types
        raise _unreadable(f"no model can be built from {directory.path}/config.json", error) from error


def _from_pretrained(directory: ModelDirectory, dtype: torch.dtype | str) -> PreTrainedModel:
    refuse_remote_code(directory.config, directory.path)
    if not directory.layers:  # SemisparseQuantizer makes these checks for a compressed model
        model = meta_model(directory)
        refuse_unstored(model, directory.stored_bytes)
        _refuse_unlike(model, directory)
    try:
        config = AutoConfig.from_pretrained(directory.path, **NO_REMOTE_CODE)
        model, report = auto_class(config).from_pretrained(
            directory.path, dtype=dtype, use_safetensors=True, output_loading_info=True, **NO_REMOTE_CODE
        )
    except (SemisparseError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many types
        raise _unreadable(f"cannot load {directory.path}", error) from error
    if report["missing_keys"]:
        raise CheckpointError(
            f"tensor {min(report['missing_keys'])} is missing from the safetensors files of {directory.path}"
        )
    unknown = sorted(report["unexpected_keys"])
    if unknown:  # such as the head of a classifier, whose embeddings are tied to the head that is built instead
        first = f"{unknown[0][:MAX_SHOWN]}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}"
        kind = type(model).__name__
        warnings.warn(f"{kind} has no place for tensor {first} of {directory.path}: left out", stacklevel=2)
    if not directory.layers:
        refuse_integers(model, ())
    plain_outputs(model.config)
    return model.eval()


def plain_outputs(config: PretrainedConfig) -> None:
    """Let a model return its usual outputs, whatever its config.json asks for: no tuples, no attention weights."""
    config.output_attentions = config.output_hidden_states = False
    config.return_dict = True


def _refuse_unlike(model: PreTrainedModel, directory: ModelDirectory) -> None:
    """Refuse stored tensors of another shape than the model's, and weights in integers, which transformers would cast.

    Args:
        model: dense, on the meta device. Tensors that are stored under other names than the model's are not checked.
        directory: what is stored.
    Raises:
        CheckpointError: names the tensor, what it is and what the model has.
    """
    for name, parameter in model.named_parameters():
        header = directory.headers.get(name)
        if header is None:
            continue
        if header.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"tensor {name} is {list(header.shape)}, the model of config.json has {list(parameter.shape)}"
            )
        if header.dtype is not None and not header.dtype.is_floating_point:
            raise CheckpointError(
                f"tensor {name} is stored as {header.dtype}, expected floating-point weights: integers are codes, "
                "which mean nothing without the quantization_config of the tool that wrote them"
            )


def _unreadable(what: str, error: Exception) -> CheckpointError:
    message = " ".join(str(error).split())  # transformers' advice has several lines
    return CheckpointError(f"{what}: {type(error).__name__}: {message[:MAX_MESSAGE]}")

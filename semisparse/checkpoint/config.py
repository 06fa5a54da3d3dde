"""The JSON files of an untrusted directory: reading them, and bounds on what config.json claims."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semisparse.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

MAX_JSON_BYTES = 1 << 28
"""Maximum size of a JSON file. The index and config block of a model with 10^5 linear layers take a tenth of it."""

LIMITS = (
    (re.compile("size|dim|position|embd|inner|rank|length|channel|window(?!.*layer)"), -1, 1 << 31),
    (re.compile("layer(?!.*theta)"), -(1 << 10), 1 << 10),
    (re.compile("label|head|expert"), -100, 1 << 16),
)
"""Minimum and maximum of a number in config.json. The first row whose expression matches the key applies: sizes come
before counts because of keys such as Gemma-3n's ``vocab_size_per_layer_input``; Granite's ``layer_rope_theta`` is no
count. Real configs hold negative numbers that are no sizes: -1 for "no limit" (DeBERTa's ``max_relative_positions``),
layers counted from the last (LLaVA's ``vision_feature_layer``: -2), and -100, the label that losses ignore."""

MAX_SHARE, FREE_PARAMETERS = 16, 1 << 24
"""The parameters and buffers of a model have at most ``MAX_SHARE`` elements per stored byte, plus
``FREE_PARAMETERS``."""

MAX_NAME = 64
"""Maximum characters of ``model_type``."""

AT_LEAST_ONE = (
    "hidden_size", "n_embd", "num_attention_heads", "n_head", "vocab_size", "num_hidden_layers", "n_layer",
    "max_position_embeddings", "n_positions",
)  # fmt: skip
"""Keys whose numbers are at least 1. From ``num_hidden_layers: -1`` transformers builds a model without decoder
layers."""

MAX_INTEGER = (1 << 63) - 1
"""Maximum of an integer in config.json, whatever its key: torch computes with 64 bits and raises OverflowError or
ValueError beyond them, some of it in the forward pass."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""Keys of the number of experts in a layer, and of those that compute a token. torch raises RuntimeError in the forward
pass if there are fewer than are chosen. Dense variants of such models have 0 or 1 experts and compute with none."""

SHOWN_CHARACTERS = 24
"""Maximum characters of a number in a message: `read_json` accepts integers of 4,300 digits."""


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, too large, nested too deeply, not JSON or no object.
    """
    try:
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file} is no regular file")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        where = f" in {file.absolute().parent}" if file.parent == Path() else ""  # such as `inspect .`
        raise CheckpointError(f"{file} is missing{where}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} is unreadable: it is nested too deeply") from error
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8 or JSON, or an integer of over 4,300 digits
        raise CheckpointError(f"{file} is unreadable: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected a JSON object")
    return content


def check_sizes(config: Mapping[str, Any], where: object) -> None:
    """Refuse a config whose numbers no model has, before transformers builds one from them.

    Args:
        config: the content of config.json; `read_block` checks its ``quantization_config``.
        where: the directory, for messages.
    Raises:
        CheckpointError: a number is NaN or outside its row of `LIMITS`, one of `AT_LEAST_ONE` is below 1, the
            experts of a token are more than there are or fewer than 0, or ``model_type`` is no short name.
    """
    kind = config.get("model_type", "")
    if not isinstance(kind, str) or len(kind) > MAX_NAME:
        raise CheckpointError(f"{where}: model_type is {str(kind)[:MAX_NAME]!r} in config.json, expected a short name")
    described = {key: value for key, value in config.items() if key != "quantization_config"}
    for key, number in _numbers(described):
        least, most = _range_of(key, number)
        if not least <= number <= most:  # true of NaN, too
            expected = "a number" if most == math.inf else f"{least} to {most}"
            raise CheckpointError(f"{where}: {key} is {_shown(number)} in config.json, expected {expected}")
    for part in _parts(described):
        _check_experts(part, where)


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object in nested objects and lists: ``text_config`` may itself have an ``ffn_config``."""
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            yield value
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


def _check_experts(config: Mapping[str, Any], where: object) -> None:
    """Refuse a model, or a part of one, that chooses more experts than it has, or fewer than none.

    Either number may be a list. Lists of one length belong together, number by number, as the text and image experts of
    ERNIE 4.5 VL do; otherwise every choice is compared with the fewest experts.
    """
    held = [[number for _, number in _numbers(config[key])] for key in EXPERTS if key in config]
    most = min((number for numbers in held for number in numbers if number > 1), default=math.inf)
    for key in CHOSEN:
        chosen = [number for _, number in _numbers(config.get(key))]
        paired = next((numbers for numbers in held if len(numbers) == len(chosen) > 1), None)
        for at, number in enumerate(chosen):
            limit = most if paired is None else paired[at] if paired[at] > 1 else math.inf
            if not 0 <= number <= limit:
                expected = "0 or more" if limit == math.inf else f"0 to {limit}, as many experts as there are"
                raise CheckpointError(f"{where}: {key} is {_shown(number)} in config.json, expected {expected}")


def refuse_unstored(model: nn.Module, stored: int) -> None:
    """Refuse a model far too large for its files: transformers would fill missing tensors with random numbers.

    Args:
        model: on the meta device, its compressed layers replaced by sparse ones.
        stored: bytes of all tensors in the files.
    Raises:
        CheckpointError: its parameters and buffers have more than ``MAX_SHARE * stored + FREE_PARAMETERS`` elements.
    """
    wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if wanted > MAX_SHARE * stored + FREE_PARAMETERS:
        raise CheckpointError(
            f"the model of config.json has {wanted} parameters, too many for {stored} stored bytes: expected at most "
            f"{MAX_SHARE * stored + FREE_PARAMETERS}"
        )


def refuse_integers(model: nn.Module, packed: Collection[str]) -> None:
    """Refuse dense weights of integers: transformers keeps the dtype of such tensors, and no layer computes with them.

    Args:
        model: loaded.
        packed: names of its compressed layers.
    Raises:
        CheckpointError: names the first such weight.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and name.rpartition(".")[0] not in packed:
            raise CheckpointError(f"tensor {name} is {parameter.dtype}, expected floating-point weights")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in nested objects and lists, with its key."""
    pending = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.items()
        elif isinstance(value, list | tuple):
            pending += ((key, each) for each in value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(key), value


def _range_of(key: str, number: float) -> tuple[float, float]:
    """Return the minimum and maximum of a key's numbers; if no row of `LIMITS` matches, floats have none."""
    others = (-MAX_INTEGER, MAX_INTEGER) if isinstance(number, int) else (-math.inf, math.inf)
    least, most = next(((least, most) for words, least, most in LIMITS if words.search(key)), others)
    return 1 if key in AT_LEAST_ONE else least, most


def _shown(number: float) -> str:
    """Return a number as text, cut to `SHOWN_CHARACTERS`."""
    text = str(number)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"

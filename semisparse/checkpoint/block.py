"""The ``quantization_config`` block of config.json: the spec of each compressed layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from semisparse.checkpoint.file_layers import dense_digests
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.formats.base import Packed, WeightSpec, get_format

METHOD = "semisparse"
VERSION = 1
"""Version of the config block. A block of another version is refused."""


def read_entry(name: str, entry: Any) -> Packed:
    """Return a layer as its entry declares it: its spec, and tensors on the meta device with their dtypes and shapes.

    Args:
        name: the layer's module name, for error messages.
        entry: the layer's entry in the block.
    Raises:
        CheckpointError: it is no object, a key is missing, or the format, version, pattern, dtype or a shape is
            invalid.
    """
    if not isinstance(entry, Mapping):
        raise CheckpointError(
            f"layer {name}: its entry in config.json is {type(entry).__name__}, expected a JSON object"
        )
    try:
        spec = WeightSpec.from_dict(entry)
        get_format(spec.format).check_spec(spec)
        declared = Packed.empty(spec)
        _refuse_gpu_layout(declared)
        return declared
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"layer {name}: its entry in config.json is unreadable: {error!r}") from error
    except SemisparseError as error:
        raise CheckpointError(f"layer {name}: {error}") from error


def _refuse_gpu_layout(declared: Packed) -> None:
    """Refuse a layout for GPUs: layers are built in the layout on disk, whose tensors have other names.

    Raises:
        CheckpointError: the params declare another layout than the one on disk.
    """
    try:
        on_disk = get_format(declared.spec.format).arrange(declared, "cpu") is declared
    except RuntimeError:  # it would convert tensors, which have no values on the meta device
        on_disk = False
    if not on_disk:
        raise CheckpointError(
            f"its params {dict(declared.params)} declare a layout for GPUs, expected the one on disk: write the model "
            "with save_pretrained"
        )


def packed_from_tensors(name: str, declared: Packed, tensors: Mapping[str, Tensor]) -> Packed:
    """Return a declared layer with its tensors, after validating them (`Format.validate`).

    Args:
        name: the layer's module name, for error messages.
        declared: the layer, as `read_entry` returns it.
        tensors: the stored tensors by name.
    Raises:
        CheckpointError: a tensor is invalid; names the layer, the tensor and the fault.
    """
    packed = Packed(declared.spec, dict(tensors))
    try:
        get_format(packed.spec.format).validate(packed)
    except SemisparseError as error:
        raise CheckpointError(f"layer {name}: {error}") from error
    return packed


def read_block(block: Any) -> dict[str, Packed]:
    """Return every compressed layer of a block, as `read_entry` does, by module name, layer 10 after layer 9.

    Raises:
        CheckpointError: the block is no object or another library's, its version is unknown, or an entry or the
            digests are unreadable.
    """
    if not isinstance(block, Mapping):
        raise CheckpointError(f"quantization_config in config.json is {type(block).__name__}, expected a JSON object")
    if block.get("quant_method") != METHOD:
        raise CheckpointError(
            f"the model is quantised by {block.get('quant_method')!r}, not by {METHOD}; `semisparse compress MODEL "
            "--recipe keep --out DIR` takes GPTQ, AWQ, compressed-tensors, fp8 and MXFP4; for any other method, take "
            "the dense model"
        )
    if block.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint version {block.get('version')!r} is unknown; this semisparse reads version {VERSION}"
        )
    dense_digests(block)
    layers = block.get("layers")
    if not isinstance(layers, Mapping):
        raise CheckpointError("config.json has no table of layers under quantization_config")
    return {name: read_entry(name, layers[name]) for name in sorted(layers, key=_numeric_order)}


def _numeric_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in names by value; `int` would refuse one of more than 4,300 digits."""
    digits = ((part, part.lstrip("0")) for part in name.split("."))
    return [(len(number), number) if part.isdecimal() else (-1, part) for part, number in digits]

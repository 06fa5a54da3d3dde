"""The ``quantization_config`` block of config.json: what each compressed layer is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from semisparse.errors import CheckpointError, SemisparseError
from semisparse.formats.base import Packed, WeightSpec, get_format

METHOD = "semisparse"
VERSION = 1


def declared(name: str, entry: Mapping[str, Any]) -> Packed:
    """Read a layer's declaration; its tensors are on the meta device and say what dtypes and shapes the file must have.

    Raises:
        CheckpointError: a key is missing, or the format, version, pattern, dtype or a shape is impossible.
    """
    try:
        spec = WeightSpec.from_dict(entry)
        get_format(spec.format).check_spec(spec)
        return Packed.empty(spec)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"layer {name}: its entry in config.json is unreadable: {error!r}") from error
    except SemisparseError as error:
        raise CheckpointError(f"layer {name}: {error}") from error


def filled(name: str, declared: Packed, tensors: Mapping[str, Tensor]) -> Packed:
    """Give a declared layer its tensors, and check all that a kernel will rely on.

    Raises:
        CheckpointError: names the layer, the tensor and what is wrong with it.
    """
    packed = Packed(declared.spec, dict(tensors))
    try:
        get_format(packed.spec.format).validate(packed)
    except SemisparseError as error:
        raise CheckpointError(f"layer {name}: {error}") from error
    return packed


def read_block(block: Mapping[str, Any]) -> dict[str, Packed]:
    """Read the whole block: every compressed layer's declaration by module name, in the order of the names' numbers.

    Raises:
        CheckpointError: the block is not semisparse's, or of an unknown version, or an entry is unreadable.
    """
    if block.get("quant_method") != METHOD:
        raise CheckpointError(f"the model is quantised by {block.get('quant_method')!r}, not by {METHOD}")
    if block.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint version {block.get('version')!r} is unknown; this semisparse reads version {VERSION}"
        )
    layers = block.get("layers")
    if not isinstance(layers, Mapping):
        raise CheckpointError("config.json has no table of layers under quantization_config")
    return {name: declared(name, layers[name]) for name in sorted(layers, key=_by_number)}


def _by_number(name: str) -> list[tuple[int, str]]:
    """Order layer 10 behind layer 9; the table itself is in alphabetical order, because JSON is written so."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

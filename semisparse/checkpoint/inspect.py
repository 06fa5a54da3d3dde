"""What a model directory holds, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from semisparse.checkpoint.directory import open_directory
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.formats.base import Packed, get_format


def inspect_directory(
    path: str | Path, verify: bool = False, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Describe a model directory.

    Args:
        path: dense or compressed; in a dense one the densities show what an earlier pruning left.
        verify: validate every packed tensor too.
        progress: called with (layers done, all layers).
    Returns:
        ``layers`` (name, format, pattern, shape, density, bits_per_weight, bytes, error, outcome; the last two and the
        pattern are None where nothing was compressed; the density of compressed layers is what config.json says),
        ``bytes`` of all tensors, ``layer_bytes`` and ``bits_per_weight`` of the compressed layers, and ``verified``.
    Raises:
        CheckpointError: the directory is incomplete or corrupted.
    """
    directory = open_directory(path)
    entries = directory.config.get("quantization_config", {}).get("layers", {})
    dense = [
        name
        for name, header in directory.headers.items()
        if name.endswith(".weight") and len(header.shape) == 2 and name.removesuffix(".weight") not in directory.layers
    ]
    compressed, others = [], []
    total = len(directory.layers) + len(dense)
    for name in directory.layers:
        if verify:
            _validate(name, directory.packed(name))
        compressed.append(_packed_row(name, directory.layers[name], entries[name]))
        if progress:
            progress(len(compressed), total)
    for name in dense:
        others.append(_dense_row(name.removesuffix(".weight"), directory.read(name)))
        if progress:
            progress(len(compressed) + len(others), total)
    layer_bytes = sum(row["bytes"] for row in compressed)
    weights = sum(row["shape"][0] * row["shape"][1] for row in compressed)
    return {
        "layers": compressed + others,
        "bytes": sum(header.nbytes for header in directory.headers.values()),
        "layer_bytes": layer_bytes,
        "bits_per_weight": 8 * layer_bytes / weights if weights else None,
        "verified": verify,
    }


def _validate(name: str, packed: Packed) -> None:
    try:
        get_format(packed.spec.format).validate(packed)
    except (SemisparseError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"layer {name} is corrupted: {error}") from error


def _packed_row(name: str, packed: Packed, entry: Mapping[str, Any]) -> dict[str, Any]:
    density = entry.get("density")
    return {
        "name": name,
        "format": packed.spec.format,
        "pattern": str(packed.pattern),
        "shape": list(packed.shape),
        "density": density if isinstance(density, float | int) else None,
        "bits_per_weight": packed.bits_per_weight,
        "bytes": packed.nbytes,
        "error": entry.get("error"),
        "outcome": entry.get("outcome"),
    }


def _dense_row(name: str, weight: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "format": "dense",
        "pattern": None,
        "shape": list(weight.shape),
        "density": _density(weight),
        "bits_per_weight": 8.0 * weight.element_size(),
        "bytes": weight.numel() * weight.element_size(),
        "error": None,
        "outcome": None,
    }


def _density(weight: Tensor) -> float:
    return int((weight != 0).sum()) / max(weight.numel(), 1)

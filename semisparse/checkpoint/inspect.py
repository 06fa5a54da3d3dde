"""Describing a model directory layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

from torch import Tensor

from semisparse.checkpoint.digests import check_digests
from semisparse.checkpoint.directory import ModelDirectory
from semisparse.checkpoint.file_digests import THREADS, FileDigests
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.formats.base import Packed, bytes_on_gpu, get_format


def describe(
    directory: ModelDirectory,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    digests: FileDigests | None = None,
) -> dict[str, Any]:
    """Describe a model directory.

    Args:
        directory: dense or compressed, as `open_directory` returns it.
        verify: whether to validate every packed tensor, and to compare it with its digest.
        progress: called with (layers done, all layers).
        digests: the digests of the files, as far as they are known.
    Returns:
        A dictionary:

        - ``layers``: per layer its name, format, pattern, shape [N, K], density, bits_per_weight, bytes, error and
          outcome. A compressed layer's density is the one in config.json, a dense layer's is counted. Dense layers have
          no pattern, error and outcome (None).
        - ``bytes``: bytes of all tensors.
        - ``layer_bytes`` and ``bits_per_weight``: bytes of the compressed layers, and bits per weight (None if there
          are none).
        - ``gpu_layer_bytes``: about the bytes that the compressed layers take on a GPU, the most of all GPUs.
        - ``verified``: the argument ``verify``.
    Raises:
        CheckpointError: a tensor is corrupted.
    """
    entries = (directory.config.get("quantization_config") or {}).get("layers", {})
    dense = [
        name
        for name, header in directory.headers.items()
        if name.endswith(".weight") and len(header.shape) == 2 and name.removesuffix(".weight") not in directory.layers
    ]
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if progress:
            progress(len(rows), len(directory.layers) + len(dense))

    with ThreadPoolExecutor(THREADS) as pool:
        # In the order of names, in which safetensors stores tensors and `digests` computes them.
        checked = (
            pool.map(lambda name: _verify(directory, name, entries[name], digests), sorted(directory.layers))
            if verify
            else ()
        )
        for (name, packed), _ in zip_longest(directory.layers.items(), checked):
            add(_packed_row(name, packed, entries[name]))
    for name in dense:
        add(_dense_row(name.removesuffix(".weight"), directory.read(name)))
    layer_bytes = sum(packed.nbytes for packed in directory.layers.values())
    weights = sum(packed.shape[0] * packed.shape[1] for packed in directory.layers.values())
    return {
        "layers": rows,
        "bytes": directory.stored_bytes,
        "layer_bytes": layer_bytes,
        "gpu_layer_bytes": sum(map(bytes_on_gpu, directory.layers.values())),
        "bits_per_weight": 8 * layer_bytes / weights if weights else None,
        "verified": verify,
    }


def _verify(directory: ModelDirectory, name: str, entry: Mapping[str, Any], digests: FileDigests | None) -> None:
    packed = directory.packed(name)
    check_digests(name, packed.tensors, entry, digests)
    try:
        get_format(packed.spec.format).verify(packed)
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
        "density": int(weight.count_nonzero()) / max(weight.numel(), 1),
        "bits_per_weight": 8.0 * weight.element_size(),
        "bytes": weight.numel() * weight.element_size(),
        "error": None,
        "outcome": None,
    }

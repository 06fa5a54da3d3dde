"""Describing a model directory layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from semisparse.checkpoint.digests import check_digest, check_digests, digest_of
from semisparse.checkpoint.directory import ModelDirectory
from semisparse.checkpoint.file_layers import DIGESTS, THREADS, FileLayers, dense_digests
from semisparse.errors import CheckpointError, SemisparseError
from semisparse.formats.base import Packed, bytes_on_gpu, get_format

MAX_SHOWN = 200
"""Maximum characters of a tensor's name in a message."""


def describe(
    directory: ModelDirectory,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    layers: FileLayers | None = None,
) -> dict[str, Any]:
    """Describe a model directory.

    Args:
        directory: dense or compressed, as `open_directory` returns it.
        verify: whether to validate every packed tensor, and to compare tensors with their digests.
        progress: called with (layers done, all layers).
        layers: the layers that are read already, or being read, if they are verified.
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
        - ``without_digests``: how many compressed layers have no digests in config.json.
    Raises:
        CheckpointError: a tensor is corrupted.
    """
    entries = (directory.config.get("quantization_config") or {}).get("layers", {})
    dense = [
        name
        for name, header in directory.headers.items()
        if name.endswith(".weight") and len(header.shape) == 2 and name.removesuffix(".weight") not in directory.layers
    ]

    digests = dense_digests(directory.config.get("quantization_config")) if verify else {}

    def row_of(name: str) -> dict[str, Any]:
        if name in directory.layers:
            packed = _verify(directory, name, entries[name], layers) if verify else directory.layers[name]
            return _packed_row(name, packed, entries[name])
        return _dense_row(directory, name, layers, digests.get(name))

    order = {name: at for at, name in enumerate(layers.names if layers else ())}
    others = [name for name in digests if name not in dense]  # norms and biases, which have no row
    names, rows = sorted((*directory.layers, *dense, *others), key=lambda name: order.get(name, len(order))), {}
    with ThreadPoolExecutor(THREADS) as pool:
        for name, row in zip(names, pool.map(row_of, names), strict=True):
            rows[name] = row
            if progress:
                progress(len(rows), len(names))
    layer_bytes = sum(packed.nbytes for packed in directory.layers.values())
    weights = sum(packed.shape[0] * packed.shape[1] for packed in directory.layers.values())
    return {
        "layers": [rows[name] for name in (*directory.layers, *dense)],
        "bytes": directory.stored_bytes,
        "layer_bytes": layer_bytes,
        "gpu_layer_bytes": layer_bytes_on(directory.layers.values()),
        "bits_per_weight": 8 * layer_bytes / weights if weights else None,
        "verified": verify,
        "without_digests": sum(entries[name].get(DIGESTS) is None for name in directory.layers),
    }


def layer_bytes_on(layers: Iterable[Packed], capability: tuple[int, int] | None = None) -> int:
    """Return about the bytes that layers take on a GPU.

    Args:
        layers: in the layout on disk; on the meta device, too.
        capability: the GPU's compute capability; None for the most of all GPUs.
    """
    return sum(bytes_on_gpu(packed, capability) for packed in layers)


def _verify(directory: ModelDirectory, name: str, entry: Mapping[str, Any], layers: FileLayers | None) -> Packed:
    """Check a layer's content and digests; return it as declared, since the memory of its content is used again."""
    with layers.held(name) if layers else nullcontext() as stored:
        packed = directory.packed(name, stored)
        computed = {tensor: stored[f"{name}.{tensor}"].digest for tensor in packed.tensors} if stored else {}
        check_digests(name, packed.tensors, entry, computed)
        try:
            get_format(packed.spec.format).verify(packed)
        except (SemisparseError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"layer {name} is corrupted: {error}") from error
    return directory.layers[name]


def _packed_row(name: str, packed: Packed, entry: Mapping[str, Any]) -> dict[str, Any]:
    density = entry.get("density")
    known = isinstance(density, float | int) and not isinstance(density, bool) and 0 <= density <= 1
    return {
        "name": name,
        "format": packed.spec.format,
        "pattern": str(packed.pattern),
        "shape": list(packed.shape),
        "density": density if known else None,
        "bits_per_weight": packed.bits_per_weight,
        "bytes": packed.nbytes,
        "error": entry.get("error"),
        "outcome": entry.get("outcome"),
    }


def _dense_row(directory: ModelDirectory, name: str, layers: FileLayers | None, declared: Any) -> dict[str, Any]:
    """Describe a dense tensor, once it has been compared with its digest, if it has one."""
    if name not in directory.headers:
        raise CheckpointError(
            f"tensor {name[:MAX_SHOWN]} is missing from the safetensors files; config.json has its digest"
        )
    with layers.held(name) if layers else nullcontext() as stored:
        weight = directory.tensor(name, stored) if stored else directory.read(name)
        if declared is not None:
            check_digest(name, (stored and stored[name].digest) or digest_of(weight), declared)
        nonzero = int(weight.count_nonzero())
    return {
        "name": name.removesuffix(".weight"),
        "format": "dense",
        "pattern": None,
        "shape": list(weight.shape),
        "density": nonzero / max(weight.numel(), 1),
        "bits_per_weight": 8.0 * weight.element_size(),
        "bytes": weight.numel() * weight.element_size(),
        "error": None,
        "outcome": None,
    }

"""Writing compressed models for tools without semisparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from semisparse import checkpoint
from semisparse.api.job import copy_other_files
from semisparse.errors import InputError
from semisparse.integrations.exporters import compressed_tensors
from semisparse.integrations.names import stored_keys

TARGETS = ("dense", "compressed-tensors")
"""What `export` writes."""


def export(model: str | Path, to: str, out: str | Path) -> dict[str, Any]:
    """Write a compressed model for tools that do not know semisparse.

    Args:
        model: a directory that semisparse compressed.
        to: ``dense``: 16-bit weights with their zeros in place; ``compressed-tensors``: layers in 8 bits in the formats
            of that package, the others dense.
        out: the directory to write, atomically.
    Returns:
        ``to``, ``bytes`` (of the safetensors files) and ``dense_layers``: the compressed layers that are written dense.
    Raises:
        InputError: ``to`` is unknown, ``out`` exists, the model is not compressed, or compressed-tensors has no format
            for any of its layers.
        CheckpointError: the directory is missing, incomplete or corrupted.
    """
    if to not in TARGETS:
        raise InputError(f"cannot export to {to!r}; known: {', '.join(TARGETS)}")
    source, out = Path(model), Path(out)
    checkpoint.refuse_existing(out)
    directory = checkpoint.open_directory(source)
    if not directory.layers:
        raise InputError(f"{source} is not compressed: there is nothing to export")
    loaded = checkpoint.load_model(source, "cpu", _dtype_of(directory))
    written = {}
    if to == "compressed-tensors":
        quantised = compressed_tensors.quantised_layers(loaded)
        names = stored_keys(loaded, [f"{name}.weight" for name in quantised])
        written = {names[f"{name}.weight"].removesuffix(".weight"): weight for name, weight in quantised.items()}
    if to == "compressed-tensors" and not written:
        raise InputError(
            f"compressed-tensors has no format for any layer of {source}: it takes layers in int8 or fp8 with a scale "
            "per row; export --to dense"
        )
    loaded.dequantize()
    with checkpoint.atomic_directory(out) as scratch:
        loaded.save_pretrained(scratch)
        if written:
            compressed_tensors.rewrite(scratch, written)
        copy_other_files(source, scratch)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {"to": to, "bytes": size, "dense_layers": sorted(set(directory.layers) - set(written))}


def _dtype_of(directory: checkpoint.ModelDirectory) -> torch.dtype:
    """Return the dtype of the model's dense tensors, by config.json; float32 if that does not say."""
    name = directory.config.get("dtype", directory.config.get("torch_dtype"))
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32

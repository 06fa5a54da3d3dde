"""Writing compressed models for tools without semisparse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from semisparse import checkpoint
from semisparse.api.job import copy_other_files
from semisparse.errors import InputError
from semisparse.integrations.exporters import compressed_tensors
from semisparse.integrations.names import stored_keys

TARGETS = ("dense", "compressed-tensors")
"""The values of `export`'s argument ``to``."""


def export(model: str | Path, to: str, out: str | Path) -> dict[str, Any]:
    """Write a compressed model for tools that do not know semisparse.

    Args:
        model: a directory that semisparse compressed.
        to: ``dense`` for dense weights in the model's dtype, with zeros where pruned; ``compressed-tensors`` for
            quantised layers in that package's formats and the others dense.
        out: the directory to write, atomically.
    Returns:
        ``to``, ``bytes`` (of the safetensors files), ``dense_layers`` (compressed layers that are written dense) and
        ``widened_layers`` (written in 8 bits because their zero points are not integers).
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
    rounded = compressed_tensors.rounded_layers(loaded) if to == "compressed-tensors" else {}
    loaded.dequantize()
    # The package supports only nn.Linear: GPT-2's Conv1D and fused experts are written dense.
    names = _stored_names(loaded, [name for name, module in loaded.named_modules() if isinstance(module, nn.Linear)])
    written = {names[name]: layer for name, layer in rounded.items() if name in names}
    if to == "compressed-tensors" and not written:
        name, packed = next(iter(directory.layers.items()))
        raise InputError(
            f"compressed-tensors has no format for any layer of {source}: layer {name} is stored as "
            f"{packed.spec.format} {packed.pattern}, expected an nn.Linear quantised to at most 8 bits; use --to dense"
        )
    with checkpoint.atomic_directory(out) as scratch:
        loaded.save_pretrained(scratch)
        if written:
            compressed_tensors.rewrite(scratch, written, set(names.values()) - set(written))
        copy_other_files(source, scratch)
    return {
        "to": to,
        "bytes": sum(file.stat().st_size for file in out.glob("*.safetensors")),
        "dense_layers": sorted(set(directory.layers) - set(written)),
        "widened_layers": sorted(name for name, layer in written.items() if layer.widened),
    }


def _stored_names(model: PreTrainedModel, modules: Iterable[str]) -> dict[str, str]:
    """Return the names on disk of linear layers, by module name."""
    names = stored_keys(model, [f"{name}.weight" for name in modules])
    return {key.removesuffix(".weight"): name.removesuffix(".weight") for key, name in names.items()}


def _dtype_of(directory: checkpoint.ModelDirectory) -> torch.dtype:
    """Return the dtype of the model's dense tensors, as config.json names it; float32 if it names none."""
    name = directory.config.get("dtype", directory.config.get("torch_dtype"))
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else torch.float32

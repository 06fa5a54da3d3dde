"""Writing quantised layers as compressed-tensors' ``pack-quantized``, ``int-quantized`` and ``float-quantized``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from semisparse.nn import SparseLinear

if TYPE_CHECKING:
    from semisparse.formats.base import Codes

TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
"""The scheme of x: 8 bits with a scale per token, as our kernels quantise it."""


@dataclass(frozen=True)
class StoredLayer:
    """A layer as compressed-tensors stores it.

    Args:
        tensors: its tensors by the last component of their names.
        scheme: the config group of the layer, without its targets.
        widened: whether codes were widened to 8 bits, because their zero points are not integers.
    """

    tensors: dict[str, Tensor]
    scheme: dict[str, Any]
    widened: bool = False


def rounded_layers(model: PreTrainedModel) -> dict[str, StoredLayer]:
    """Return the quantised layers of a model, by module name.

    Args:
        model: on a CPU, its layers packed.
    """
    layers = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            codes = layer.read_codes()
            if codes is not None:
                layers[name] = _by_row(codes) if codes.zero is None else _by_group(codes, codes.zero)
    return layers


def _by_row(codes: Codes) -> StoredLayer:
    """Store 8-bit values with a scale per row."""
    kind = "int" if codes.values.dtype == torch.int8 else "float"
    common = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    scheme = {"weights": common, "input_activations": TOKEN | {"type": kind}, "format": f"{kind}-quantized"}
    return StoredLayer({"weight": codes.values, "weight_scale": codes.scale.float().contiguous()}, scheme)


def _by_group(codes: Codes, zero: Tensor) -> StoredLayer:
    """Store codes with a scale and an integer zero point per group.

    Fractional zero points become integers in 8 bits: ``(2^s code - 2^s zero) * (scale / 2^s)`` with s = 8 - bits.
    """
    bits, values, scale = codes.bits, codes.values, codes.scale
    widened = not torch.equal(zero, zero.round())
    if widened:
        factor = 2 ** (8 - bits)
        values, zero, bits = values * factor, zero * factor, 8
        divided = scale / factor  # exact in its dtype, unless it underflows
        scale = divided if torch.equal(divided.float() * factor, scale.float()) else scale.float() / factor
    size = gcd(codes.size, values.shape[1])  # the package derives a group's size from K and the number of groups
    tiles = torch.arange(values.shape[1] // size) * size // codes.size
    scale, zero, half = scale[:, tiles].contiguous(), zero[:, tiles].to(torch.uint8), 2 ** (bits - 1)
    symmetric = bool((zero == half).all())
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": size}
    scheme: dict[str, Any] = {"weights": weights | {"dynamic": False}, "format": "pack-quantized"}
    tensors = {"weight_scale": scale}
    if codes.rounds_x:
        scheme |= {"input_activations": TOKEN | {"type": "int"}, "format": "int-quantized"}
        tensors["weight"] = _signed(values, half)
        if not symmetric:
            tensors["weight_zero_point"] = _signed(zero, half)
    else:
        tensors["weight_packed"] = _packed(values, bits)
        tensors["weight_shape"] = torch.tensor(values.shape)
        if not symmetric:
            tensors["weight_zero_point"] = _packed(zero.T, bits).T.contiguous()
    return StoredLayer(tensors, scheme, widened)


def _signed(codes: Tensor, half: int) -> Tensor:
    return (codes.to(torch.int16) - half).to(torch.int8)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Put unsigned codes [rows, columns] into int32 words, ``32 // bits`` per word, the first in the lowest bits."""
    per_word = 32 // bits
    codes = F.pad(codes, (0, -codes.shape[1] % per_word)).to(torch.int64).unflatten(1, (-1, per_word))
    words = (codes << bits * torch.arange(per_word)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rewrite(directory: Path, layers: Mapping[str, StoredLayer], dense: Iterable[str]) -> None:
    """Replace dense weights in a model directory by quantised ones, and declare them in config.json.

    Args:
        directory: as ``save_pretrained`` wrote it.
        layers: quantised layers, by their names in the files.
        dense: names of the linear layers that stay dense.
    """
    weight_map, total = {}, 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
            metadata = opened.metadata()
        for layer in [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]:
            if layer in layers:
                del tensors[f"{layer}.weight"]
                tensors.update({f"{layer}.{part}": tensor for part, tensor in layers[layer].tensors.items()})
        save_file(tensors, file, metadata)
        weight_map.update(dict.fromkeys(tensors, file.name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    config = directory / "config.json"
    declared = json.loads(config.read_text()) | {"quantization_config": _declaration(layers, dense)}
    config.write_text(json.dumps(declared, indent=2))


def _declaration(layers: Mapping[str, StoredLayer], dense: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config``: a config group per scheme."""
    schemes: dict[str, list[str]] = {}
    for name, layer in layers.items():
        schemes.setdefault(json.dumps(layer.scheme), []).append(name)
    groups = {f"group_{i}": {"targets": names, **json.loads(text)} for i, (text, names) in enumerate(schemes.items())}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(dense),
    }
